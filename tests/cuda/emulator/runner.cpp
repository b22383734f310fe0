// Runs kernels for another process, which a sanitizer's report must not end. Says which kernels it has, then answers
// one request after the other: integers of eight bytes each, and buffers as they are. See emulator.py, which asks.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "runtime.h"
#ifdef EMULATOR_ADDRESS
#include <sanitizer/asan_interface.h>
#endif

namespace {

constexpr size_t ALIGNMENT = 256;  // of what a GPU's allocator gives

// Global memory that arguments point into: exactly `bytes`, so that ASan sees what lies beside, and with the address
// that the caller's memory has within ALIGNMENT bytes.
struct Region {
    size_t skip, bytes;
    char* memory;

    char* begin() const { return memory + skip; }
};

void read(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) exit(0);  // nobody asks any more
}

int64_t read_integer() {
    int64_t value;
    read(&value, sizeof value);
    return value;
}

std::string read_text() {
    std::string text(read_integer(), '\0');
    read(&text[0], text.size());
    return text;
}

void write(const void* from, size_t bytes) { fwrite(from, 1, bytes, stdout); }

void write_text(const char* text) {
    int64_t bytes = strlen(text);
    write(&bytes, sizeof bytes);
    write(text, bytes);
}

Region read_region() {
    Region region;
    region.skip = read_integer();
    region.bytes = read_integer();
    void* memory;
    if (posix_memalign(&memory, ALIGNMENT, region.skip + region.bytes)) abort();
    region.memory = static_cast<char*>(memory);
    read(region.begin(), region.bytes);
#ifdef EMULATOR_ADDRESS
    __asan_poison_memory_region(region.memory, region.skip);
#endif
    return region;
}

void write_and_release(const std::vector<Region>& regions) {
    for (const Region& region : regions) {
        write(region.begin(), region.bytes);
#ifdef EMULATOR_ADDRESS
        __asan_unpoison_memory_region(region.memory, region.skip);
#endif
        free(region.memory);
    }
}

// The value of an argument: its bytes, in which addresses in regions stand at some places.
std::vector<uint64_t> read_argument(const std::vector<Region>& regions) {
    int64_t bytes = read_integer();
    std::vector<uint64_t> value((bytes + 7) / 8);
    read(value.data(), bytes);
    for (int64_t addresses = read_integer(); addresses; --addresses) {
        int64_t at = read_integer(), region = read_integer(), offset = read_integer();
        const char* address = regions[region].begin() + offset;
        memcpy(reinterpret_cast<char*>(value.data()) + at, &address, sizeof address);
    }
    return value;
}

// False: the launch failed.
bool answer() {
    std::string kernel = read_text();
    int64_t grid = read_integer(), block = read_integer(), seed = read_integer(), seconds = read_integer();
    std::vector<Region> regions(read_integer());
    for (Region& region : regions) region = read_region();
    std::vector<std::vector<uint64_t>> values(read_integer());
    std::vector<void*> arguments;
    for (auto& value : values) {
        value = read_argument(regions);
        arguments.push_back(value.data());
    }
    emulator_limit(int(seconds));
    bool failed = emulate(kernel.c_str(), int(grid), int(block), seed, arguments.data());
    write_text(failed ? emulator_error() : "");
    if (!failed) write_and_release(regions);
    fflush(stdout);
    return !failed;
}

}  // namespace

int main() {
    write_text(emulator_kernels());
    fflush(stdout);
    while (answer()) continue;  // a launch that failed leaves stacks behind that would puzzle the sanitizers
    _exit(0);
}
