// Copies rows of keys and values, or of latents, into their slots of a cache of the same dtype: one memcpy per contiguous
// run. Called by write.py.
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int64_t PARALLEL_BYTES = 1 << 18;  // for fewer bytes one thread is faster

// Strides and sizes are in bytes.
struct Plane {
    const char* rows;  // [T, K, runs * run]
    char* cells;       // [N, B, K, runs, run]
    int64_t row, row_head, cell_block, cell_token, cell_head, cell_run;
    int64_t heads, runs, run;
};

struct Write {
    const void* slots;  // [T] int32 or int64; negative: padding
    int64_t slot_bytes, T, N, B, num_planes, threads;
    Plane planes[2];
};

// Returns 0, or 1 if a slot is out of range; then nothing was written.
extern "C" int64_t write_rows(const Write* write) {
    const Write& w = *write;
    std::vector<int64_t> slots(w.T);  // a copy: no other thread can change it between check and use
    for (int64_t t = 0; t < w.T; t++) {
        slots[t] = w.slot_bytes == 4 ? static_cast<const int32_t*>(w.slots)[t] : static_cast<const int64_t*>(w.slots)[t];
        if (slots[t] >= w.N * w.B) return 1;
    }
    int64_t bytes = 0, tasks = 0;
    for (int64_t p = 0; p < w.num_planes; p++) {
        const Plane& plane = w.planes[p];
        bytes += w.T * plane.heads * plane.runs * plane.run;
        tasks += plane.heads;
    }
    // One task per head of a plane, so that the last token of a slot wins.
#pragma omp parallel for num_threads(int(bytes < PARALLEL_BYTES ? 1 : w.threads))
    for (int64_t task = 0; task < tasks; task++) {
        const Plane& plane = w.planes[task >= w.planes[0].heads];
        const int64_t head = task >= w.planes[0].heads ? task - w.planes[0].heads : task;
        for (int64_t t = 0; t < w.T; t++) {
            if (slots[t] < 0) continue;
            const char* from = plane.rows + t * plane.row + head * plane.row_head;
            char* to = plane.cells + slots[t] / w.B * plane.cell_block + slots[t] % w.B * plane.cell_token + head * plane.cell_head;
            for (int64_t n = 0; n < plane.runs; n++) std::memcpy(to + n * plane.cell_run, from + n * plane.run, plane.run);
        }
    }
    return 0;
}
