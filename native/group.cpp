#include "group.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "polytempo.h"

namespace pt {

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int64_t most_ns) {
    timespec most{most_ns / 1'000'000'000, most_ns % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0); // every return is a reason to look again
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool Patience::exhausted() {
    if (spins_left > 0) {
        --spins_left;
        relax();
        return false;
    }
    const int64_t now = now_ns();
    if (since_ns == 0) since_ns = now;
    if (now - since_ns > yield_ns) return true;
    sched_yield();
    return false;
}

int64_t Group::place_of(const void* data, int64_t num_bytes) const {
    const int64_t offset = static_cast<const char*>(data) - arenas[rank];
    return offset >= 0 && offset + num_bytes <= static_cast<int64_t>(arena_bytes) ? offset + 1 : 0;
}

void arrive(Group& group) {
    Member& me = group.member(group.rank);
    // seq_cst: either this store is seen by a rank that is about to sleep, or its count of sleepers is seen here.
    me.phase.store(++group.phase, std::memory_order_seq_cst);
    if (me.sleepers.load(std::memory_order_seq_cst)) wake(me.phase);
}

static bool has_arrived(const Member& member, uint32_t phase) { // acquire: what it wrote before is seen after
    return static_cast<int32_t>(member.phase.load(std::memory_order_acquire) - phase) >= 0;
}

bool has_left(const Group& group, int rank) { return group.member(rank).state.load(std::memory_order_acquire) != HERE; }

bool has_ended(const Group& group, int rank) {
    if (group.pidfds[rank] < 0)
        return kill(group.member(rank).pid.load(std::memory_order_relaxed), 0) != 0 && errno == ESRCH;
    pollfd ended{group.pidfds[rank], POLLIN, 0};
    return poll(&ended, 1, 0) > 0 && ended.revents & POLLIN; // not POLLNVAL: a closed descriptor says nothing
}

bool is_gone(const Group& group, int rank) {
    return rank != group.rank && (has_left(group, rank) || has_ended(group, rank));
}

static Status breaks(Group& group, Status why, int culprit) {
    group.broken = why;
    group.culprit = culprit;
    return why;
}

// A rank that is gone and has not arrived never will; one that arrived before it ended is as good as here.
static int lost_rank(const Group& group) {
    for (int rank = 0; rank < group.size; ++rank)
        if (!has_arrived(group.member(rank), group.phase) && is_gone(group, rank) &&
            !has_arrived(group.member(rank), group.phase))
            return rank;
    return -1;
}

static Status wait_for(Group& group, int rank, int64_t deadline_ns) {
    Member& peer = group.member(rank);
    Patience patience(group);
    while (!has_arrived(peer, group.phase)) {
        if (!patience.exhausted()) continue;
        const uint32_t seen = peer.phase.load(std::memory_order_acquire);
        peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - group.phase) < 0 && peer.state.load() == HERE)
            sleep_on(peer.phase, seen, SLICE_NS);
        peer.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (has_arrived(peer, group.phase)) break;
        const int lost = lost_rank(group);
        if (lost >= 0) return breaks(group, LOST, lost);
        if (now_ns() > deadline_ns) return breaks(group, LATE, rank);
    }
    return FINE;
}

Status wait_for_all(Group& group, int64_t deadline_ns) {
    for (int step = 1; step < group.size; ++step) {
        const Status status = wait_for(group, (group.rank + step) % group.size, deadline_ns);
        if (status != FINE) return status;
    }
    return FINE;
}

void wait_for_living(const Group& group, int64_t deadline_ns) {
    std::atomic<uint32_t> nobody{0};
    for (int rank = 0; rank < group.size; ++rank)
        while (!has_arrived(group.member(rank), group.phase) && !is_gone(group, rank) && now_ns() < deadline_ns)
            sleep_on(nobody, 0, 1'000'000);
}

static void issue(Group& group, uint64_t number) { // only this rank writes it; nothing else is read because of it
    std::atomic<uint64_t>& issued = group.member(group.rank).issued;
    if (issued.load(std::memory_order_relaxed) < number) issued.store(number, std::memory_order_relaxed);
}

Call& describe(
    Group& group, Kind kind, int32_t dtype, int32_t op, int32_t root, int64_t count, int64_t extra, int64_t form) {
    ++group.number;
    issue(group, group.number);
    Call& call = group.call(group.rank);
    call = Call{group.number, kind, dtype, op, root, count, extra, form, 0, 0};
    return call;
}

Status agree(Group& group) {
    const Call& mine = group.call(group.rank);
    for (int rank = 0; rank < group.size; ++rank)
        if (std::memcmp(&mine, &group.call(rank), COMPARED_BYTES) != 0) return breaks(group, MISMATCH, rank);
    return FINE;
}

} // namespace pt

using namespace pt;

static size_t member_bytes(int size) {
    const size_t bytes = sizeof(Member) + sizeof(int64_t) * 4 * size;
    return (bytes + 63) / 64 * 64;
}

int64_t pt_control_bytes(int32_t size) { return static_cast<int64_t>(member_bytes(size)) * size; }

pt_group* pt_group_open(const pt_group_place* place) {
    const int size = place->size;
    auto* group = static_cast<Group*>(std::calloc(1, sizeof(Group)));
    group->rank = place->rank;
    group->expecting = -1;
    group->size = size;
    group->control = static_cast<char*>(place->control);
    group->member_bytes = member_bytes(size);
    group->arenas = static_cast<char**>(std::calloc(size, sizeof(char*)));
    group->staging = static_cast<char**>(std::calloc(size, sizeof(char*)));
    group->rings = static_cast<char**>(std::calloc(size, sizeof(char*)));
    group->pidfds = static_cast<int*>(std::calloc(size, sizeof(int)));
    for (int rank = 0; rank < size; ++rank) {
        group->arenas[rank] = static_cast<char*>(place->arenas[rank]);
        group->staging[rank] = static_cast<char*>(place->staging[rank]);
        group->rings[rank] = static_cast<char*>(place->rings[rank]);
        group->pidfds[rank] = place->pidfds[rank];
    }
    group->arena_bytes = place->arena_bytes;
    group->block_bytes = place->block_bytes;
    group->spins = size <= place->num_cores ? 1500 : 0; // with more ranks than cores, whoever is awaited needs ours
    group->yield_ns = 100'000;
    group->points = open_points(*group, place->ring_bytes);
    group->member(group->rank).pid.store(place->pid, std::memory_order_relaxed);
    return reinterpret_cast<pt_group*>(group);
}

void pt_group_leave(pt_group* handle) {
    auto& group = *reinterpret_cast<Group*>(handle);
    Member& me = group.member(group.rank);
    if (me.state.load(std::memory_order_relaxed) == HERE) me.state.store(LEFT, std::memory_order_seq_cst);
    wake(me.phase);
    for (int rank = 0; rank < group.size; ++rank) {
        Member& other = group.member(rank);
        other.bell.fetch_add(1, std::memory_order_seq_cst);
        wake(other.bell);
    }
}

int32_t pt_group_empty(pt_group* handle) {
    const auto& group = *reinterpret_cast<Group*>(handle);
    group.member(group.rank).state.store(CLOSED, std::memory_order_seq_cst);
    for (int rank = 0; rank < group.size; ++rank)
        if (group.member(rank).state.load(std::memory_order_seq_cst) != CLOSED && !has_ended(group, rank)) return 0;
    return 1;
}

void pt_group_close(pt_group* handle) {
    auto* group = reinterpret_cast<Group*>(handle);
    close_points(*group);
    std::free(group->arenas);
    std::free(group->staging);
    std::free(group->rings);
    std::free(group->pidfds);
    std::free(group);
}

int32_t pt_group_culprit(pt_group* handle) { return reinterpret_cast<Group*>(handle)->culprit; }

int32_t pt_group_expecting(pt_group* handle, int64_t* sent, int64_t* expected) {
    const auto& group = *reinterpret_cast<Group*>(handle);
    if (group.expecting >= 0) {
        *sent = group.lengths(group.culprit)[group.expecting];
        *expected = group.lengths(group.expecting)[group.size + group.culprit];
    }
    return group.expecting;
}

int32_t pt_group_missing(pt_group* handle, int32_t rank) {
    const auto& group = *reinterpret_cast<Group*>(handle);
    return !has_arrived(group.member(rank), group.phase);
}

int32_t pt_group_issue(pt_group* handle, double patience_s) {
    auto& group = *reinterpret_cast<Group*>(handle);
    const uint64_t number = group.number + 1;
    issue(group, number);
    const int64_t deadline_ns = deadline_after(patience_s);
    Patience patience(group);
    for (int rank = 0; rank < group.size; ++rank)
        while (group.member(rank).issued.load(std::memory_order_relaxed) < number) {
            if (now_ns() >= deadline_ns) return 0;
            patience.exhausted(); // spins or yields; for so short a time sleeping is not worth it
        }
    return 1;
}

void pt_group_call(pt_group* handle, int32_t rank, pt_call* call) {
    const Call& found = reinterpret_cast<Group*>(handle)->call(rank);
    *call = pt_call{static_cast<int64_t>(found.number), found.count, found.extra, found.form, found.kind, found.dtype, found.op, found.root};
}

int32_t pt_barrier(pt_group* handle, double timeout_s) {
    auto& group = *reinterpret_cast<Group*>(handle);
    if (group.broken != FINE) return BROKEN;
    describe(group, BARRIER, 0, 0, 0, 0, 0);
    const Status status = meet(group, deadline_after(timeout_s));
    return status == FINE ? agree(group) : status;
}
