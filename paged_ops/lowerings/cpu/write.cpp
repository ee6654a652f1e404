// Copies rows of keys and values, or of latents, into their slots of a cache of the same dtype: one memcpy per contiguous
// run. Called by write.py.
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int64_t PARALLEL_BYTES = 1 << 18;  // for fewer bytes one thread is faster

// Strides and sizes are in bytes.
struct Plane {  // rows [T, K, runs * run] and cells [N, B, K, runs, run]
    int64_t row, row_head, cell_block, cell_token, cell_head, cell_run;
    int64_t heads, runs, run;
};

struct Write {
    int64_t slot_bytes, T, N, B;
    Plane planes[2];
};

struct Tensors {
    const char* rows[2];
    char* caches[2];
    const void* slots;  // [T] int32 or int64; negative: padding
    int64_t threads;
    int64_t row_bytes[2], cache_bytes[2], slots_bytes;  // from the first element to the end of the last one
    int64_t where[2];                                   // bytes from a cache to its first cell
    int64_t apart;                                      // bytes between the caches that were checked

    // Whether a cache may share memory with another tensor.
    bool overlap() const {
        const auto in_cache = [&](const void* tensor, int64_t bytes) {
            const char* from = static_cast<const char*>(tensor);
            return (from < caches[0] + cache_bytes[0] && caches[0] < from + bytes) ||
                   (from < caches[1] + cache_bytes[1] && caches[1] < from + bytes);
        };
        return caches[1] - caches[0] != apart || in_cache(rows[0], row_bytes[0]) || in_cache(rows[1], row_bytes[1]) ||
               in_cache(slots, slots_bytes);
    }
};

// Returns 0, or 1 if Python must check: a slot is out of range, or a cache may share memory with another tensor; then
// nothing was written.
extern "C" int64_t write_rows(const Write* write, const Tensors* tensors) {
    const Write& w = *write;
    const Tensors& given = *tensors;
    if (given.overlap()) return 1;
    std::vector<int64_t> slots(w.T);  // a copy: no other thread can change it between check and use
    for (int64_t t = 0; t < w.T; t++) {
        slots[t] = w.slot_bytes == 4 ? static_cast<const int32_t*>(given.slots)[t] : static_cast<const int64_t*>(given.slots)[t];
        if (slots[t] >= w.N * w.B) return 1;
    }
    int64_t bytes = 0, tasks = 0;
    for (const Plane& plane : w.planes) {
        bytes += w.T * plane.heads * plane.runs * plane.run;
        tasks += plane.heads;
    }
    // One task per head of a plane, so that the last token of a slot wins.
#pragma omp parallel for num_threads(int(bytes < PARALLEL_BYTES ? 1 : given.threads))
    for (int64_t task = 0; task < tasks; task++) {
        const bool second = task >= w.planes[0].heads;
        const Plane& plane = w.planes[second];
        const int64_t head = second ? task - w.planes[0].heads : task;
        const char* rows = given.rows[second] + head * plane.row_head;
        char* cells = given.caches[second] + given.where[second] + head * plane.cell_head;
        for (int64_t t = 0; t < w.T; t++) {
            if (slots[t] < 0) continue;
            const char* from = rows + t * plane.row;
            char* to = cells + slots[t] / w.B * plane.cell_block + slots[t] % w.B * plane.cell_token;
            for (int64_t n = 0; n < plane.runs; n++) std::memcpy(to + n * plane.cell_run, from + n * plane.run, plane.run);
        }
    }
    return 0;
}
