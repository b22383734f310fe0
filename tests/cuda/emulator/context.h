// Stacks to run on, and the switch from one to another, announced to the sanitizers.
//
// EMULATOR_ADDRESS or EMULATOR_THREAD is defined if the kernels are compiled with ASan or TSan; the run-time never is.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if !defined(__x86_64__)
#define EMULATOR_UCONTEXT
#endif

#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif
#ifdef EMULATOR_ADDRESS
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATOR_THREAD
#include <sanitizer/tsan_interface.h>

extern "C" void __tsan_atomic8_store(volatile unsigned char* address, unsigned char value, int order);
#endif

namespace emulator {

#if defined(EMULATOR_ADDRESS) || defined(EMULATOR_THREAD)
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif

struct Context {
    char* stack = nullptr;  // its lowest address
    size_t bytes = 0;
#ifdef EMULATOR_UCONTEXT
    ucontext_t registers;
#else
    void* stack_pointer = nullptr;  // while it does not run; the registers lie there
#endif
#ifdef EMULATOR_ADDRESS
    void* fake_stack = nullptr;
#endif
#ifdef EMULATOR_THREAD
    void* tsan = nullptr;
#endif
};

#ifdef EMULATOR_UCONTEXT

inline void prepare(Context& context, void (*entry)()) {
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = context.stack;
    context.registers.uc_stack.ss_size = context.bytes;
    makecontext(&context.registers, entry, 0);
}

inline void jump(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

#else

extern "C" void emulator_jump(void** from, void* to);
asm(R"(
    .text
    .type emulator_jump, @function
emulator_jump:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_jump, .-emulator_jump
)");

// Six registers, where to go, and a null return address above, at which unwinders stop.
inline void prepare(Context& context, void (*entry)()) {
    void** top = reinterpret_cast<void**>(context.stack + context.bytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context.stack_pointer = top;
}

inline void jump(Context& from, Context& to) { emulator_jump(&from.stack_pointer, to.stack_pointer); }

#endif

// A stack with a page below it that cannot be written.
inline void make_stack(Context& context) {
    size_t page = sysconf(_SC_PAGESIZE);
    void* memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE)) abort();
    context.stack = static_cast<char*>(memory) + page;
    context.bytes = STACK_BYTES;
#ifdef EMULATOR_THREAD
    context.tsan = __tsan_create_fiber(0);
#endif
}

// The stack that the caller runs on.
inline void adopt_stack([[maybe_unused]] Context& context) {
#ifdef EMULATOR_ADDRESS
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &context.bytes);
    pthread_attr_destroy(&attributes);
    context.stack = static_cast<char*>(stack);
#endif
#ifdef EMULATOR_THREAD
    context.tsan = __tsan_get_current_fiber();
#endif
}

// To be called first on a new stack.
inline void arrive([[maybe_unused]] Context& here) {
#ifdef EMULATOR_ADDRESS
    __sanitizer_finish_switch_fiber(here.fake_stack, nullptr, nullptr);
#endif
}

inline void switch_to(Context& to, Context& from) {
#ifdef EMULATOR_ADDRESS
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.bytes);
#endif
#ifdef EMULATOR_THREAD
    __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    jump(from, to);
    arrive(from);
}

// ---- What TSan is told about order. Nothing else orders the fibres: a switch does not.

struct Order {  // a point in time that others can wait for
    uint8_t byte = 0;
};

inline void tell([[maybe_unused]] Order& order) {
#ifdef EMULATOR_THREAD
    __tsan_release(&order.byte);
#endif
}

inline void learn([[maybe_unused]] Order& order) {
#ifdef EMULATOR_THREAD
    __tsan_acquire(&order.byte);
#endif
}

// All of `count` contexts meet: what each did before comes before what any does after. Done here for all of them, so
// that none learns what another did later.
template <class At>
void meet_all([[maybe_unused]] Order& order, [[maybe_unused]] Context& here, [[maybe_unused]] int count,
              [[maybe_unused]] At at) {
#ifdef EMULATOR_THREAD
    constexpr unsigned NO_SYNC = __tsan_switch_to_fiber_no_sync;
    for (int i = 0; i < count; i++) {
        __tsan_switch_to_fiber(at(i).tsan, NO_SYNC);
        if (i == 0) __tsan_atomic8_store(&order.byte, 0, __ATOMIC_RELEASE);  // forgets earlier meetings
        __tsan_release(&order.byte);
    }
    for (int i = 0; i < count; i++) {
        __tsan_switch_to_fiber(at(i).tsan, NO_SYNC);
        __tsan_acquire(&order.byte);
    }
    __tsan_switch_to_fiber(here.tsan, NO_SYNC);
#endif
}

}  // namespace emulator
