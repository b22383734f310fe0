// All CUDA kernels, as one module per element type. nvrtc.py compiles it.
//
// The sources use neither the C++ library nor CUB nor cooperative groups, so that the tests can compile them for the
// host and run each CUDA thread as a fibre.

#include "decode.cuh"

#if NCZ_DTYPE != 3  // neither serves double
#include "differences.cuh"
#include "fixed_rate.cuh"
#else
#define NCZ_DIFFERENCE_KERNELS(X)
#define NCZ_FIXED_RATE_KERNELS(X)
#endif

#if NCZ_DTYPE == 0 || NCZ_DTYPE == 3  // the types of steps
#include "scales.cuh"
#else
#define NCZ_SCALE_KERNELS(X)
#endif

#define NCZ_MODULE_KERNELS(X) \
    NCZ_SCALE_KERNELS(X) NCZ_VALUE_KERNELS(X) NCZ_FRAME_KERNELS(X) NCZ_PLANES_KERNELS(X) NCZ_HUFFMAN32_KERNELS(X) \
    NCZ_DECODE_KERNELS(X) NCZ_FIXED_RATE_KERNELS(X) NCZ_DIFFERENCE_KERNELS(X)

#if NCZ_DTYPE == 0  // what works on codes alone is in this module only
#include "open.cuh"
#define NCZ_KERNELS(X) NCZ_MODULE_KERNELS(X) NCZ_SELECT_KERNELS(X) NCZ_OPEN_KERNELS(X)
#else
#define NCZ_KERNELS(X) NCZ_MODULE_KERNELS(X)
#endif
