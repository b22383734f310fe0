// Runs the threads of a kernel's blocks as fibres of one thread: see runtime.h for what it does, cuda.h for its limits.
#include <signal.h>
#include <sys/time.h>
#include <time.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "runtime.h"

namespace emulator {

constexpr int LANES = 32, MAX_THREADS = 1024;
#ifdef EMULATOR_THREAD
constexpr int RESIDENT_THREADS = 512;  // TSan takes a millisecond and 850 KB for each
#else
constexpr int RESIDENT_THREADS = 1024;
#endif
constexpr int MAX_RESIDENT = 8;  // blocks; and always at least two
constexpr size_t SHARED_LIMIT = 48 << 10, ARENA = 128 << 10, RED_ZONE = 64;
constexpr unsigned MAX_ARRAYS = 255;  // in the whole source; of a template, each instance counts
constexpr unsigned char GARBAGE = 0xA5;
constexpr uint64_t GARBAGE_VALUE = 0xA5A5A5A5A5A5A5A5;
constexpr long PATIENCE = 1 << 21;  // looks at flags while nothing else happens, before they count as in vain
constexpr int RECENT = 4;           // atomic operations that a fence orders what follows behind

const char* const MEETINGS[] = {"__syncwarp",      "__shfl_sync",   "__shfl_up_sync", "__shfl_down_sync",
                                "__shfl_xor_sync", "__ballot_sync", "__any_sync",     "__all_sync"};

struct Warp;
struct Block;

struct Fibre : Thread {
    Context context;
    Block* home;
    Warp* warp;
    int lane;
    Place waits_at;                   // in a barrier or for a flag
    void* recent[RECENT];             // addresses of the last atomic operations
    int operations;                   // how many there were
    std::vector<Copy> copies;         // under way
    Copy copy;                        // the last that was taken from there
    std::unique_ptr<Context> fenced;  // knows what this thread did before its last fence; made by the first
};

// Each live lane that does not run has its bit in one of ready, looking, meeting and in_barrier.
struct Warp {
    unsigned live, ready, looking, meeting, in_barrier;
    int number;  // of all resident
    Fibre* fibres[LANES];
    Offer offers[LANES];  // of those that are meeting
    uint64_t results[LANES];
    Order order;
};

struct Array {
    const Shared* source;
    char* memory;  // null: this block has not asked for it
};

struct Block {
    Index index;
    int live, in_barrier;
    uint64_t warps;  // bits of all resident
    int first_fibre;
    char* arena;
    size_t used, asked;
    Array arrays[MAX_ARRAYS + 1];  // by number
    Order order;
};

struct Policy {  // in which order threads that could run do
    bool random;
    bool stay_in_warp, stay_in_block;
    bool same_first;  // prefer the same warps for a while
    int lanes;        // 0: in order, 1: backwards, 2: random
};

Thread* thread;
Index block_size, grid_size;

static std::string error, table;
static bool failed;
static std::vector<std::unique_ptr<Fibre>> fibres;
static std::vector<Warp> warps;
static std::vector<Block> blocks;  // resident
static std::vector<int> waiting;   // numbers of the blocks that have not started, last one first
static const Kernel* kernel;
static void** arguments;
static Context outside;  // who called emulate()
static Order launched, ended;
static uint64_t ready_warps;
static int active;  // resident blocks that run
static long in_vain;
static unsigned long long launch_seed;
static int limit_seconds = 60;
static uint64_t random_state;
static Policy policy;
static unsigned first_warp;
static Warp* last_warp;
static unsigned shared_arrays;
static char* arenas;
static size_t arenas_bytes;

static Fibre& self() { return *static_cast<Fibre*>(thread); }

static uint64_t random64() {  // splitmix64
    uint64_t x = random_state += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static unsigned below(unsigned count) { return unsigned((random64() >> 32) * count >> 32); }
static bool chance(unsigned one_in) { return below(one_in) == 0; }

// ---- Errors: leave all fibres as they are and return to the caller of emulate()

static std::string text(const char* format, ...) {
    char buffer[512];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    return buffer;
}

static std::string at(Place place) {
    const char* slash = strrchr(place.file, '/');
    return text("%s:%d", slash ? slash + 1 : place.file, place.line);
}

static std::string name_of(const Fibre& fibre) { return text("block %u, thread %u", fibre.block.x, fibre.thread.x); }

static std::string described(const Offer& offer) {
    return text("%s(mask %08x) at %s", MEETINGS[int(offer.kind)], offer.mask, at(offer.place).c_str());
}

[[noreturn]] static void fail(const std::string& what) {
    error = text("%s, seed %llu: ", kernel->name, launch_seed) + what;
    failed = true;
    tell(ended);
    switch_to(outside, self().context);
    abort();
}

[[noreturn]] static void fail_here(const std::string& what) { fail(name_of(self()) + ": " + what); }

static std::string state_of(const Fibre& fibre) {
    const Warp& warp = *fibre.warp;
    unsigned bit = 1u << fibre.lane;
    if (!(warp.live & bit)) return "has ended";
    if (warp.meeting & bit) return "waits in " + described(warp.offers[fibre.lane]);
    if (warp.in_barrier & bit) return "waits in __syncthreads at " + at(fibre.waits_at);
    if (warp.looking & bit) return "waits for a value at " + at(fibre.waits_at);
    return "runs";
}

// What the threads of all unfinished blocks do, neighbours that do the same in one line.
static std::string states() {
    std::string result;
    int lines = 0;
    for (const Block& block : blocks) {
        if (!block.live) continue;
        int count = int(block_size.x);
        for (int first = 0, end; first < count; first = end) {
            const std::string state = state_of(*fibres[block.first_fibre + first]);
            for (end = first + 1; end < count && state_of(*fibres[block.first_fibre + end]) == state;) end++;
            if (++lines > 40) return result + "\n  ...";
            result += text("\n  block %u, threads %d to %d: ", block.index.x, first, end - 1) + state;
        }
    }
    return result;
}

// ---- Whose turn it is

static void make_ready(Warp& warp, unsigned lanes) {
    warp.ready |= lanes;
    ready_warps |= 1ull << warp.number;
}

static void end_looks() {
    for (Warp& warp : warps) {
        if (warp.looking) make_ready(warp, warp.looking);
        warp.looking = 0;
    }
}

// The lowest number in the set that is not below `first`, if there is one.
static int pick(uint64_t set, unsigned first) {
    uint64_t rest = set >> first << first;
    return __builtin_ctzll(rest ? rest : set);
}

static Warp& next_warp() {
    uint64_t set = ready_warps;
    if (!policy.random) return warps[__builtin_ctzll(set)];
    if (policy.stay_in_warp && last_warp->ready && !chance(64)) return *last_warp;
    uint64_t siblings = last_warp->fibres[0]->home->warps & set;
    if (policy.stay_in_block && siblings && !chance(64)) set = siblings;
    if (!policy.same_first || chance(256)) first_warp = below(unsigned(warps.size()));
    return warps[pick(set, first_warp)];
}

static int next_lane(const Warp& warp) {
    switch (policy.lanes) {
        case 0: return __builtin_ctz(warp.ready);
        case 1: return 31 - __builtin_clz(warp.ready);
        default: return pick(warp.ready, below(LANES));
    }
}

static Fibre& take_next() {
    Warp& warp = next_warp();
    int lane = next_lane(warp);
    warp.ready &= ~(1u << lane);
    if (!warp.ready) ready_warps &= ~(1ull << warp.number);
    last_warp = &warp;
    return *warp.fibres[lane];
}

// Returns when it is this thread's turn again.
static void run_others() {
    Fibre& here = self();
    bool patient = in_vain < PATIENCE;
    if (!ready_warps && !patient) fail("threads wait for a value that nobody stores:" + states());
    if (!ready_warps || (policy.random && patient && chance(64))) end_looks();
    if (!ready_warps) fail("nobody is left to run:" + states());
    Fibre& next = take_next();
    thread = &next;
    if (&next != &here) switch_to(next.context, here.context);
}

static void let_others_run() {
    make_ready(*self().warp, 1u << self().lane);
    run_others();
}

// ---- Meetings of lanes

static bool same_operation(const Offer& a, const Offer& b) {
    if (a.kind != b.kind || a.mask != b.mask) return false;
    if (a.kind == Meeting::SYNCWARP) return true;
    return a.place.line == b.place.line && !strcmp(a.place.file, b.place.file);
}

// The lane that `lane` reads from in a shuffle.
static int source_of(const Offer& offer, int lane) {
    int first = lane & -offer.width, last = first + offer.width - 1;
    int source;
    switch (offer.kind) {
        case Meeting::SHFL: return first + (offer.operand & (offer.width - 1));
        case Meeting::SHFL_UP: source = lane - offer.operand; return source < first ? lane : source;
        case Meeting::SHFL_DOWN: source = lane + offer.operand; return source > last ? lane : source;
        default: source = lane ^ offer.operand; return source > last ? lane : source;
    }
}

static unsigned votes(const Warp& warp, unsigned mask) {
    unsigned result = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        result |= unsigned(warp.offers[lane].value) << lane;
    }
    return result;
}

static uint64_t result_for(const Warp& warp, int lane, unsigned ballot) {
    const Offer& offer = warp.offers[lane];
    switch (offer.kind) {
        case Meeting::SYNCWARP: return 0;
        case Meeting::BALLOT: return ballot;
        case Meeting::ANY: return ballot != 0;
        case Meeting::ALL: return ballot == offer.mask;
        default: break;
    }
    int source = source_of(offer, lane);
    return source >= 0 && source < LANES && offer.mask >> source & 1 ? warp.offers[source].value : GARBAGE_VALUE;
}

static void order_lanes(Warp& warp, unsigned mask) {
    Fibre* members[LANES];
    int count = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) members[count++] = warp.fibres[__builtin_ctz(rest)];
    meet_all(warp.order, self().context, count, [&](int i) -> Context& { return members[i]->context; });
}

static void finish_meeting(Warp& warp, const Offer& offer) {
    unsigned ballot = offer.kind >= Meeting::BALLOT ? votes(warp, offer.mask) : 0;
    for (unsigned rest = offer.mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        warp.results[lane] = result_for(warp, lane, ballot);
    }
    if (offer.kind == Meeting::SYNCWARP) order_lanes(warp, offer.mask);
    warp.meeting &= ~offer.mask;
    make_ready(warp, offer.mask);
    in_vain = 0;
}

static void check_offer(const Warp& warp, int lane, const Offer& offer) {
    bool shuffles = offer.kind > Meeting::SYNCWARP && offer.kind < Meeting::BALLOT;
    if (!(offer.mask >> lane & 1)) fail_here(described(offer) + " does not name the lane itself");
    if (offer.mask & ~warp.live) fail_here(described(offer) + " names lanes that have ended or do not exist");
    if (shuffles && (offer.width < 1 || offer.width > LANES || offer.width & (offer.width - 1)))
        fail_here(described(offer) + text(" has the width %d", offer.width));
}

// Whether all lanes of the mask have come to the same operation. Two that wait for each other elsewhere never will.
static bool complete(const Warp& warp, int lane, const Offer& offer) {
    if (offer.mask & ~warp.meeting) return false;
    for (unsigned rest = offer.mask; rest; rest &= rest - 1) {
        int other = __builtin_ctz(rest);
        const Offer& theirs = warp.offers[other];
        if (same_operation(offer, theirs)) continue;
        if (theirs.mask >> lane & 1)
            fail_here(described(offer) + " meets " + name_of(*warp.fibres[other]) + " in " + described(theirs));
        return false;
    }
    return true;
}

uint64_t meet(const Offer& offer) {
    Warp& warp = *self().warp;
    int lane = self().lane;
    check_offer(warp, lane, offer);
    warp.offers[lane] = offer;
    warp.meeting |= 1u << lane;
    if (complete(warp, lane, offer)) finish_meeting(warp, offer);
    run_others();
    return warp.results[lane];
}

// ---- Barriers of blocks

// As synccheck has it: all threads of the block, none of which has ended, at one __syncthreads.
static void check_barrier(const Block& block) {
    if (block.in_barrier != int(block_size.x))
        fail("some threads ended while others wait in __syncthreads:" + states());
    const Place& place = fibres[block.first_fibre]->waits_at;
    for (int i = 1; i < int(block_size.x); i++) {
        const Place& other = fibres[block.first_fibre + i]->waits_at;
        if (other.line != place.line || strcmp(other.file, place.file))
            fail("threads meet in different __syncthreads:" + states());
    }
}

static void open_barrier(Block& block) {
    check_barrier(block);
    Fibre* members[MAX_THREADS];
    int count = 0;
    for (uint64_t rest = block.warps; rest; rest &= rest - 1) {
        Warp& warp = warps[__builtin_ctzll(rest)];
        for (unsigned lanes = warp.in_barrier; lanes; lanes &= lanes - 1)
            members[count++] = warp.fibres[__builtin_ctz(lanes)];
        if (warp.in_barrier) make_ready(warp, warp.in_barrier);
        warp.in_barrier = 0;
    }
    meet_all(block.order, self().context, count, [&](int i) -> Context& { return members[i]->context; });
    block.in_barrier = 0;
    in_vain = 0;
}

void barrier(Place place) {
    Fibre& here = self();
    here.waits_at = place;
    here.warp->in_barrier |= 1u << here.lane;
    if (++here.home->in_barrier == here.home->live) open_barrier(*here.home);
    run_others();
}

// ---- Shared memory

// Neither memset nor a loop that compilers make one of: TSan would count it as a write of this thread.
static void fill(void* memory, size_t bytes, unsigned char with) {
    for (volatile unsigned char* at = static_cast<unsigned char*>(memory); bytes; bytes--) *at++ = with;
}

// ASan reports what touches memory that the block did not ask for.
static void forbid([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef EMULATOR_ADDRESS
    __asan_poison_memory_region(memory, bytes);
#endif
}

static void allow([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef EMULATOR_ADDRESS
    __asan_unpoison_memory_region(memory, bytes);
#endif
}

static void clear_arena(Block& block) {
    block.used = block.asked = 0;
    fill(block.arrays, sizeof(Array) * (shared_arrays + 1), 0);
    forbid(block.arena, ARENA);
}

// Aligned as the type asks and no better, so that UBSan finds what relies on more.
static size_t offset_in_arena(size_t used, size_t alignment) {
    alignment = std::max<size_t>(alignment, 8);
    size_t offset = (used + RED_ZONE + alignment - 1) & ~(alignment - 1);
    return offset & alignment ? offset : offset + alignment;
}

static char* allocate(Block& block, Shared& array) {
    block.asked += array.bytes;
    if (block.asked > SHARED_LIMIT) fail_here(text("%s: more than 48 KB of shared memory", array.name));
    size_t offset = offset_in_arena(block.used, array.alignment);
    size_t end = offset + array.bytes + RED_ZONE;
    if (end > ARENA) fail_here(text("%s: too many shared arrays in one kernel", array.name));
    allow(block.arena + block.used, end - block.used);
    fill(block.arena + block.used, end - block.used, GARBAGE);
    forbid(block.arena + block.used, offset - block.used);
    forbid(block.arena + offset + array.bytes, RED_ZONE);
    block.used = end;
    return block.arena + offset;
}

void* shared(Shared& array) {
    Block& block = *self().home;
    if (!array.number && shared_arrays == MAX_ARRAYS) fail_here(text("%s: too many shared arrays", array.name));
    if (!array.number) array.number = ++shared_arrays;
    Array& entry = block.arrays[array.number];
    if (!entry.memory) entry = {&array, allocate(block, array)};
    return entry.memory;
}

#ifndef EMULATOR_ADDRESS
static bool is_garbage(const char* memory) {
    return std::all_of(memory, memory + RED_ZONE, [](char c) { return c == char(GARBAGE); });
}
#endif

static void check_red_zones([[maybe_unused]] const Block& block) {
#ifndef EMULATOR_ADDRESS
    for (const Array& array : block.arrays)
        if (array.memory && !(is_garbage(array.memory - RED_ZONE) && is_garbage(array.memory + array.source->bytes)))
            fail(text("block %u wrote beside its shared array %s", block.index.x, array.source->name));
#endif
}

// ---- Memory of the whole grid

static void look_away(Place place) {
    Fibre& here = self();
    here.waits_at = place;
    here.warp->looking |= 1u << here.lane;
    in_vain++;
    run_others();
}

static void perhaps_let_others_run() {
    if (policy.random && chance(4)) let_others_run();
}

static void something_happened() {
    in_vain = 0;
    perhaps_let_others_run();
}

void loaded(Place place) { look_away(place); }
void stored() { something_happened(); }

void begin(Copy copy) { self().copies.push_back(copy); }

const Copy* under_way() {
    Fibre& here = self();
    if (here.copies.empty()) return nullptr;
    here.copy = here.copies.back();
    here.copies.pop_back();
    return &here.copy;
}

void require_aligned(const void* address, size_t bytes, Place place) {
    if (reinterpret_cast<uintptr_t>(address) % bytes)
        fail_here(text("address %p of %zu bytes at ", address, bytes) + at(place) + " is not aligned");
}

// For TSan: an atomic operation publishes what came before the last fence, and a fence orders what follows behind all
// that the atomic operations before it have seen.
void fence() {
#ifdef EMULATOR_THREAD
    Fibre& here = self();
    for (int i = 0; i < std::min(RECENT, here.operations); i++) __tsan_acquire(here.recent[i]);
    if (!here.fenced) {
        here.fenced = std::make_unique<Context>();
        here.fenced->tsan = __tsan_create_fiber(0);
    }
    Order now;
    __tsan_release(&now.byte);
    __tsan_switch_to_fiber(here.fenced->tsan, __tsan_switch_to_fiber_no_sync);
    __tsan_acquire(&now.byte);
    __tsan_switch_to_fiber(here.context.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    perhaps_let_others_run();
}

void before_atomic([[maybe_unused]] void* address, size_t bytes, Place place) {
    require_aligned(address, bytes, place);
#ifdef EMULATOR_THREAD
    Fibre& here = self();
    here.recent[here.operations++ % RECENT] = address;
    if (!here.fenced) return;
    __tsan_switch_to_fiber(here.fenced->tsan, __tsan_switch_to_fiber_no_sync);
    __tsan_release(address);
    __tsan_switch_to_fiber(here.context.tsan, __tsan_switch_to_fiber_no_sync);
#endif
}

void after_atomic(bool changed, Place place) {
    if (changed)
        something_happened();
    else
        look_away(place);  // perhaps it waits in a loop
}

// ---- Blocks and their threads

static void start_block(Block& block) {
    int number = waiting.back();
    waiting.pop_back();
    block.index = {unsigned(number), 0, 0};
    block.live = int(block_size.x);
    block.in_barrier = 0;
#ifdef EMULATOR_THREAD
    block.arena = arenas + number * ARENA;  // nothing orders this block behind the last one that ran in this place
#endif
    clear_arena(block);
    for (int i = 0; i < block.live; i++) {
        Fibre& fibre = *fibres[block.first_fibre + i];
        fibre.block = block.index;
        fibre.operations = 0;
        fibre.copies.clear();
        fibre.warp->live |= 1u << fibre.lane;
        make_ready(*fibre.warp, 1u << fibre.lane);
    }
}

static void finish_block(Block& block) {
    check_red_zones(block);
    if (waiting.empty())
        active--;
    else
        start_block(block);
}

static void finish_thread() {
    Fibre& here = self();
    if (!here.copies.empty()) fail_here("ended while a copy to shared memory is under way");
    Warp& warp = *here.warp;
    Block& block = *here.home;
    warp.live &= ~(1u << here.lane);
    for (unsigned rest = warp.meeting; rest; rest &= rest - 1) {
        const Offer& offer = warp.offers[__builtin_ctz(rest)];
        if (offer.mask >> here.lane & 1) fail_here("ended while others wait for it in " + described(offer));
    }
    block.live--;
    in_vain = 0;
    if (block.live == 0)
        finish_block(block);
    else if (block.in_barrier == block.live)
        open_barrier(block);
}

static void fibre_main() {
    Fibre& here = self();
    arrive(here.context);
    for (;;) {
        learn(launched);
        kernel->run(arguments);
        tell(ended);
        finish_thread();
        if (active)
            run_others();
        else
            switch_to(outside, here.context);
    }
}

// ---- Launches

static const Kernel* find_kernel(const char* name) {
    for (int i = 0; i < kernel_count; i++)
        if (!strcmp(kernels[i].name, name)) return &kernels[i];
    return nullptr;
}

static void choose_policy() {
    random_state = launch_seed;
    policy = {};
    if (launch_seed == 0) return;
    policy.random = true;
    policy.stay_in_warp = chance(3);
    policy.stay_in_block = chance(3);
    policy.same_first = chance(2);
    policy.lanes = int(below(3));
}

// A lone block if in order, and at times in any order: correct kernels don't need more. Otherwise at least two, of which
// some wait for others.
static int choose_resident(int grid, int block) {
    if (!policy.random || chance(4)) return 1;
    int most = std::clamp(RESIDENT_THREADS / block, 2, MAX_RESIDENT);
    return std::min(grid, 2 + int(below(unsigned(most - 1))));
}

static void order_blocks(int grid) {
    waiting.resize(grid);
    for (int i = 0; i < grid; i++) waiting[i] = grid - 1 - i;
    if (!policy.random) return;
    for (int i = grid - 1; i > 0; i--) std::swap(waiting[i], waiting[below(unsigned(i + 1))]);
}

static void make_fibres(size_t count) {
    while (fibres.size() < count) {
        fibres.push_back(std::make_unique<Fibre>());
        make_stack(fibres.back()->context);
        prepare(fibres.back()->context, fibre_main);
    }
}

static void make_arenas(size_t count) {
    if (arenas_bytes >= count * ARENA) return;
    if (arenas) {
        allow(arenas, arenas_bytes);
        munmap(arenas, arenas_bytes);
    }
    arenas_bytes = count * ARENA;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, arenas_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) abort();
    arenas = static_cast<char*>(memory);
}

static void place_fibres(Block& block, int slot, int warps_per_block) {
    block.first_fibre = slot * int(block_size.x);
    block.arena = arenas + slot * ARENA;
    for (unsigned i = 0; i < block_size.x; i++) {
        Fibre& fibre = *fibres[block.first_fibre + i];
        fibre.thread = {i, 0, 0};
        fibre.home = &block;
        fibre.lane = int(i % LANES);
        fibre.warp = &warps[slot * warps_per_block + int(i) / LANES];
        fibre.warp->number = slot * warps_per_block + int(i) / LANES;
        fibre.warp->fibres[fibre.lane] = &fibre;
        block.warps |= 1ull << fibre.warp->number;
    }
}

static void prepare_launch(int grid, int block) {
    block_size = {unsigned(block), 1, 1};
    grid_size = {unsigned(grid), 1, 1};
    choose_policy();
    int resident = choose_resident(grid, block), warps_per_block = (block + LANES - 1) / LANES;
    order_blocks(grid);
    make_fibres(size_t(resident) * block);
#ifdef EMULATOR_THREAD
    make_arenas(grid);
#else
    make_arenas(resident);
#endif
    warps.assign(size_t(resident) * warps_per_block, Warp());
    blocks.assign(resident, Block());
    ready_warps = 0;
    last_warp = &warps[0];
    first_warp = 0;
    active = resident;
    in_vain = 0;
    for (int slot = 0; slot < resident; slot++) {
        place_fibres(blocks[slot], slot, warps_per_block);
        start_block(blocks[slot]);
    }
}

static void run_launch() {
    adopt_stack(outside);
    tell(launched);
    Fibre& first = take_next();
    thread = &first;
    switch_to(first.context, outside);
    learn(ended);
    thread = nullptr;
}

static bool refuse(const std::string& what) {
    error = what;
    failed = true;
    return false;
}

static bool check_launch(const char* name, int grid, int block) {
    if (!kernel) return refuse(text("there is no kernel %s", name));
    if (kernel->threads && block != kernel->threads)
        return refuse(text("%s: %d threads, but it is for %d", name, block, kernel->threads));
    if (grid < 1 || block < 1 || block > MAX_THREADS)
        return refuse(text("%s: cannot run %d blocks of %d threads", name, grid, block));
    return true;
}

// ---- Wild addresses and loops without an end: an error, not the end of the process. The sanitizers' processes do end.

#if !defined(EMULATOR_ADDRESS) && !defined(EMULATOR_THREAD)

static void on_signal(int signal, siginfo_t* information, void*) {
    if (!thread) return;  // the time was up just before or behind the launch
    if (signal == SIGVTALRM) fail_here(text("still runs after %d s", limit_seconds));
    fail_here(text("signal %d (%s), address %p", signal, strsignal(signal), information->si_addr));
}

class Traps {
   public:
    Traps() : memory_(64 << 10) {
        stack_t stack = {};
        stack.ss_sp = memory_.data();
        stack.ss_size = memory_.size();
        sigaltstack(&stack, &old_stack_);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < COUNT; i++) sigaction(SIGNALS[i], &action, &old_[i]);
        start_timer();
    }

    ~Traps() {
        timer_delete(timer_);
        for (int i = 0; i < COUNT; i++) sigaction(SIGNALS[i], &old_[i], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }

   private:
    void start_timer() {  // that signals this thread, when it has computed for so long
        struct sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = SIGVTALRM;
        event._sigev_un._tid = gettid();
        itimerspec after = {};
        after.it_value.tv_sec = limit_seconds;
        if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_)) abort();
        timer_settime(timer_, 0, &after, nullptr);
    }

    static constexpr int COUNT = 4, SIGNALS[COUNT] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
    timer_t timer_;
    std::vector<char> memory_;
    stack_t old_stack_;
    struct sigaction old_[COUNT];
};

#else

class Traps {
   public:
    Traps() { set(limit_seconds); }
    ~Traps() { set(0); }

   private:
    static void set(int seconds) {
        itimerval after = {};
        after.it_value.tv_sec = seconds;
        setitimer(ITIMER_VIRTUAL, &after, nullptr);
    }
};

#endif

}  // namespace emulator

using namespace emulator;

int emulate(const char* name, int grid, int block, unsigned long long seed, void** values) {
    failed = false;
    kernel = find_kernel(name);
    arguments = values;
    launch_seed = seed;
    if (!check_launch(name, grid, block)) return 1;
    prepare_launch(grid, block);
    {
        Traps traps;
        run_launch();
    }
    if (failed)
        for (auto& fibre : fibres) prepare(fibre->context, fibre_main);
    return failed;
}

const char* emulator_error() { return error.c_str(); }

void emulator_limit(int seconds) { limit_seconds = seconds; }

const char* emulator_kernels() {
    table.clear();
    for (int i = 0; i < kernel_count; i++)
        table += kernels[i].name + std::string(" ") + kernels[i].parameters + "\n";
    return table.c_str();
}
