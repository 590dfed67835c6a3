// How a group ends: ranks that disagree, that do not come, that leave. All others find the same, and never hang.
#include "crew.h"
#include "kernels.h"

namespace {

constexpr int64_t COUNT = 5000;

int32_t summed(Crew& crew, int rank, int64_t count, double timeout_s = LONG_S) {
    std::vector<float> data(COUNT, 1.0f);
    return pt_all_reduce(crew.groups[rank], pt::F32, pt::SUM, pt::LINEAR, -1, data.data(), count, 0, timeout_s);
}

void one_disagrees(int size, int different) {
    Crew crew(size, 1024, 256, 64);
    crew.run([&](int rank) {
        for (int call = 0; call < 3; ++call) CHECK(summed(crew, rank, COUNT) == pt::FINE);
        CHECK(summed(crew, rank, rank == different ? COUNT - 1 : COUNT) == pt::MISMATCH);
        const int culprit = pt_group_culprit(crew.groups[rank]);
        CHECK(rank == different ? culprit != different : culprit == different);
        pt_call theirs;
        pt_group_call(crew.groups[rank], culprit, &theirs);
        CHECK(theirs.number == 4 && theirs.kind == pt::ALL_REDUCE && theirs.dtype == pt::F32);
        CHECK(theirs.count == (culprit == different ? COUNT - 1 : COUNT));
        CHECK(pt_barrier(crew.groups[rank], LONG_S) == pt::BROKEN);
    });
}

void one_expects_more(int size) {
    Crew crew(size, 1024, 256, 64);
    crew.run([&](int rank) {
        std::vector<char> mine(100), theirs(200);
        std::vector<const void*> sends(size, mine.data());
        std::vector<void*> receives(size, theirs.data());
        std::vector<int64_t> send_bytes(size, 100), receive_bytes(size, 100);
        for (int other = 0; other < size; ++other) receives[other] = mine.data(); // nothing is moved
        if (rank == size - 1) receive_bytes[0] = 101;
        CHECK(pt_exchange(
                  crew.groups[rank], pt::ALL_TO_ALL, pt::U8, 0, 0, 0, size, sends.data(), send_bytes.data(),
                  receives.data(), receive_bytes.data(), LONG_S) == pt::MISMATCH);
    });
}

void one_is_late(int size) {
    Crew crew(size, 1024, 256, 64);
    crew.run([&](int rank) {
        CHECK(summed(crew, rank, COUNT) == pt::FINE);
        if (rank == 0) return;
        const int32_t status = summed(crew, rank, COUNT, 0.1);
        CHECK(status == pt::LATE);
        CHECK(pt_group_culprit(crew.groups[rank]) == 0);
        CHECK(pt_group_missing(crew.groups[rank], 0) == 1);
        CHECK(summed(crew, rank, COUNT) == pt::BROKEN);
    });
}

void one_leaves(int size, int leaver) {
    Crew crew(size, 1024, 256, 64);
    crew.run([&](int rank) {
        for (int call = 0; call < 5; ++call) CHECK(summed(crew, rank, COUNT) == pt::FINE);
        if (rank == leaver) {
            pt_group_leave(crew.groups[rank]);
            return;
        }
        CHECK(summed(crew, rank, COUNT) == pt::LOST);
        CHECK(pt_group_culprit(crew.groups[rank]) == leaver);
        CHECK(!pt_group_empty(crew.groups[rank]));
    });
}

// Who has left may still be looking at the others' memory; nobody gives his back before all have said that they do not.
void all_close(int size) {
    Crew crew(size, 1024, 256, 64);
    for (pt_group* group : crew.groups) pt_group_leave(group);
    for (int rank = 0; rank < size; ++rank) CHECK(pt_group_empty(crew.groups[rank]) == (rank == size - 1));
    pt_group_leave(crew.groups[0]); // once more: it stays closed
    for (pt_group* group : crew.groups) CHECK(pt_group_empty(group));
}

} // namespace

int main() {
    for (int size = 2; size <= 5; ++size) {
        one_disagrees(size, size - 1);
        one_disagrees(size, 0);
        one_expects_more(size);
        one_is_late(size);
        one_leaves(size, size / 2);
        all_close(size);
    }
}
