// A small stand-in for libFuzzer, where there is no clang: runs a target on seeds and on what mutations make of them.
// It takes libFuzzer's options of the same names:
//
//     target [-max_total_time=SECONDS] [-seed=NUMBER] [-artifact_prefix=PATH] FOLDER_OF_SEEDS... | INPUT...
//
// The inputs it tries only depend on the seeds and the number. Each is a mutation at random, in turn with the next of a
// systematic row: every seed cut off at every byte, and every byte of it set to values about the limits. The input that
// ends the process is written to PATHcrash. An INPUT is run once, and not written again.

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr uint8_t LIMITS[] = {0, 1, 0x7f, 0x80, 0xff};
constexpr unsigned SECONDS_FOR_ONE = 60;
constexpr size_t LONGEST = 1 << 20;

std::string artifact;
const Bytes* current = nullptr;

// What fails, sanitizers too, ends in SIGABRT; what hangs, in SIGALRM.
void save(int signal) {
    FILE* file = current ? fopen(artifact.c_str(), "wb") : nullptr;
    if (file) {
        fwrite(current->data(), 1, current->size(), file);
        fclose(file);
        fprintf(stderr, "%s: the input was written to %s\n", signal == SIGALRM ? "timeout" : "crash", artifact.c_str());
    }
    _exit(1);
}

void run_unwatched(const Bytes& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

void run(const Bytes& input) {
    current = &input;
    alarm(SECONDS_FOR_ONE);
    run_unwatched(input);
    alarm(0);
    current = nullptr;
}

Bytes read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        fprintf(stderr, "%s cannot be read\n", path.c_str());
        exit(2);
    }
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

bool is_folder(const std::string& path) {
    struct stat status;
    return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::vector<std::string> files_in(const std::string& folder) {
    std::vector<std::string> files;
    DIR* entries = opendir(folder.c_str());
    while (dirent* entry = readdir(entries))
        if (entry->d_name[0] != '.') files.push_back(folder + "/" + entry->d_name);
    closedir(entries);
    return files;
}

// Every cut and every limit at every byte, of one seed after the other.
class Systematic {
  public:
    explicit Systematic(const std::vector<Bytes>& seeds) : seeds_(seeds) {}
    bool ended() const { return seed_ == seeds_.size(); }
    Bytes next() {
        const Bytes& seed = seeds_[seed_];
        Bytes input(seed);
        if (variant_ == std::size(LIMITS))
            input.resize(at_);
        else if (at_ < seed.size())
            input[at_] = LIMITS[variant_];
        if (++variant_ > std::size(LIMITS)) variant_ = 0, ++at_;
        if (at_ > seed.size()) at_ = 0, ++seed_;
        return input;
    }

  private:
    const std::vector<Bytes>& seeds_;
    size_t seed_ = 0, at_ = 0, variant_ = 0;
};

class Mutator {
  public:
    Mutator(const std::vector<Bytes>& seeds, uint64_t number) : seeds_(seeds), random_(number) {}
    Bytes next() {
        Bytes input = any();
        for (size_t n = 1 + below(4); n; --n) mutate(input);
        if (input.size() > LONGEST) input.resize(LONGEST);
        return input;
    }

  private:
    // Not a distribution of the standard library, which are not the same everywhere.
    size_t below(size_t n) { return n ? size_t(random_() % n) : 0; }
    const Bytes& any() { return seeds_[below(seeds_.size())]; }

    void mutate(Bytes& input) {
        size_t size = input.size(), at = below(size), n = std::min(size - at, 1 + below(16));
        auto from = input.begin() + std::ptrdiff_t(at);
        switch (below(9)) {
            case 0: input.resize(below(size + 1)); break;
            case 1: input.insert(from, 1 + below(16), LIMITS[below(std::size(LIMITS))]); break;
            case 2: input.erase(from, from + std::ptrdiff_t(n)); break;
            case 3: std::generate_n(from, n, [this] { return uint8_t(random_()); }); break;
            case 4: std::fill_n(from, n, LIMITS[below(std::size(LIMITS))]); break;
            case 5: splice(input, at); break;
            case 6:
                if (size) input[at] = LIMITS[below(std::size(LIMITS))];
                break;
            case 7:
                if (size) input[at] = uint8_t(input[at] + (below(2) ? 1 : -1));
                break;
            default:
                if (size) input[at] ^= uint8_t(1u << below(8));
        }
    }

    // From `at` on as another seed.
    void splice(Bytes& input, size_t at) {
        const Bytes& other = any();
        input.resize(at);
        input.insert(input.end(), other.begin() + std::ptrdiff_t(std::min(at, other.size())), other.end());
    }

    const std::vector<Bytes>& seeds_;
    std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
    double seconds = 10;
    uint64_t number = 1;
    std::vector<std::string> paths;
    artifact = "crash";
    for (int i = 1; i < argc; ++i) {
        std::string argument = argv[i];
        auto value_of = [&](const char* name) {
            return argument.rfind(name, 0) == 0 ? argv[i] + strlen(name) : nullptr;
        };
        if (const char* value = value_of("-max_total_time=")) {
            seconds = atof(value);
        } else if (const char* value = value_of("-seed=")) {
            number = strtoull(value, nullptr, 10);
        } else if (const char* value = value_of("-artifact_prefix=")) {
            artifact = std::string(value) + "crash";
        } else {
            paths.push_back(argument);
        }
    }
    signal(SIGABRT, save);
    signal(SIGALRM, save);

    std::vector<Bytes> seeds;
    for (const std::string& path : paths) {
        if (is_folder(path))
            for (const std::string& file : files_in(path)) seeds.push_back(read(file));
        else
            run_unwatched(read(path));
    }
    if (seeds.empty()) return 0;
    // Small ones first, as they take least time; and in an order that does not depend on the folder's.
    std::sort(seeds.begin(), seeds.end(), [](const Bytes& a, const Bytes& b) {
        return a.size() != b.size() ? a.size() < b.size() : a < b;
    });

    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    Systematic systematic(seeds);
    Mutator mutator(seeds, number);
    long runs = 0;
    for (const Bytes& seed : seeds) run(seed), ++runs;
    while (std::chrono::steady_clock::now() < end) {
        if (!systematic.ended()) run(systematic.next()), ++runs;
        run(mutator.next()), ++runs;
    }
    printf("Done %ld runs%s\n", runs, systematic.ended() ? "" : " (every byte of every seed would take longer)");
    return 0;
}
