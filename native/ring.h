// A ring of bytes through which one rank sends to another, in the receiver's arena.
//
//   ring     head (written by the sender) │ tail (written by the receiver) │ held │ frame │ frame │ … │ free
//   frame    total bytes, offset, bytes, tag, dtype │ payload
//
// Head and tail count bytes. A message is cut into frames, which follow each other in the ring, so sending and
// receiving overlap. A frame is never cut: where it does not fit before the ring's end, a mark sends the reader to the
// beginning.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pt {

constexpr int64_t LINE_BYTES = 64;
constexpr int64_t LEAST_RING_BYTES = 512;
constexpr int64_t MAX_PART_BYTES = 128 << 10; // of a message in one frame

struct Frame {
    int64_t total_bytes, offset, num_bytes;
    int32_t tag, dtype;
    int64_t unused[4];
};
static_assert(sizeof(Frame) == LINE_BYTES);
constexpr int64_t GO_TO_BEGIN = -1; // the offset of a frame that is none: the next one is at the ring's beginning

struct Ring {
    alignas(64) std::atomic<uint64_t> head;
    alignas(64) std::atomic<uint64_t> tail;
    alignas(64) std::atomic<uint32_t> held; // 1: the sender has more, and waits for room
};

inline int64_t whole_lines(int64_t num_bytes) { return (num_bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES; }
inline int64_t frame_bytes(int64_t part) { return static_cast<int64_t>(sizeof(Frame)) + whole_lines(part); }
inline char* payload(Frame& frame) { return reinterpret_cast<char*>(&frame + 1); }

struct RingSizes {
    int64_t room_bytes; // of the frames
    int64_t part_bytes; // the most of a message in one frame, so that four fit

    int64_t stride() const { return static_cast<int64_t>(sizeof(Ring)) + room_bytes; }

    int64_t place_of(uint64_t count) const { return static_cast<int64_t>(count % static_cast<uint64_t>(room_bytes)); }

    Frame& frame_at(Ring& ring, int64_t place) const {
        return *reinterpret_cast<Frame*>(reinterpret_cast<char*>(&ring + 1) + place);
    }

    // Where a frame of `wanted` bytes can go: how many bytes before it are left out. -1: there is no room.
    int64_t room_for(const Ring& ring, uint64_t head, int64_t wanted) const {
        const auto used = static_cast<int64_t>(head - ring.tail.load(std::memory_order_seq_cst));
        const int64_t place = place_of(head), before_end = room_bytes - place;
        // An empty ring is used from its beginning, whose memory is in the caches, and the rest of it is never touched.
        const bool begins_again = wanted > before_end || (used == 0 && place >= 4 * part_bytes);
        const int64_t left_out = begins_again ? before_end : 0;
        return used + left_out + wanted <= room_bytes ? left_out : -1;
    }
};

inline RingSizes sizes_of(int64_t ring_bytes) {
    const int64_t room_bytes = std::max(LEAST_RING_BYTES, whole_lines(ring_bytes));
    return {room_bytes, std::min(MAX_PART_BYTES, room_bytes / 4 / LINE_BYTES * LINE_BYTES - LINE_BYTES)};
}

} // namespace pt
