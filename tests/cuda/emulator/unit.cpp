// The kernels, compiled for the emulator. NCZ_SOURCE is their source, NCZ_DTYPE the element type.
#include "cuda.h"
//
#include NCZ_SOURCE

#include <string>
#include <utility>

namespace {

template <class P>
constexpr char letter() {
    if constexpr (std::is_pointer_v<P>) return 'p';
    if constexpr (std::is_floating_point_v<P>) return 'f';
    if constexpr (std::is_integral_v<P>) return std::is_signed_v<P> ? 'i' : 'u';
    return 's';
}

template <class P>
std::string described() {
    return letter<P>() + std::to_string(sizeof(P)) + " ";
}

template <class Function>
struct Call;

template <class... P>
struct Call<void(P...)> {
    template <void (*kernel)(P...)>
    static void run(void** arguments) {
        run<kernel>(arguments, std::index_sequence_for<P...>());
    }

    template <void (*kernel)(P...), size_t... I>
    static void run(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
    }

    static const char* parameters() {
        static const std::string text = (std::string() + ... + described<std::remove_const_t<P>>());
        return text.c_str();
    }
};

}  // namespace

// Planted kernels take blocks of any size.
#ifdef NCZ_PLANTED
#define NCZ_THREADS(name) 0
#else
#define NCZ_THREADS(name) name##_threads
#endif
#define NCZ_ROW(name) {#name, &Call<decltype(name)>::run<name>, Call<decltype(name)>::parameters(), NCZ_THREADS(name)},
const emulator::Kernel emulator::kernels[] = {NCZ_KERNELS(NCZ_ROW)};
const int emulator::kernel_count = sizeof(emulator::kernels) / sizeof(emulator::Kernel);
