// D[m][n] = C[m][n] + sum_k A[m][k] B[n][k], tiles of 64 x 64 x K, a warpgroup each,
// by wgmma (A of registers or of shared memory) and by mma.sync m16n8k16.
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>

template <bool BF>
__device__ __forceinline__ void mma16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  if constexpr (BF)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#define D32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define O32(d) "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31])

template <bool BF>
__device__ __forceinline__ void wgmma_rs(float* d, const uint32_t* a, uint64_t db) {
  if constexpr (BF)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 ",{%32,%33,%34,%35},%36,1,1,1,0;"
      : O32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " D32 ",{%32,%33,%34,%35},%36,1,1,1,0;"
      : O32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));
}
template <bool BF>
__device__ __forceinline__ void wgmma_ss(float* d, uint64_t da, uint64_t db) {
  if constexpr (BF)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 ",%32,%33,1,1,1,0,0;"
      : O32(d) : "l"(da), "l"(db));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " D32 ",%32,%33,1,1,1,0,0;"
      : O32(d) : "l"(da), "l"(db));
}
__device__ __forceinline__ uint64_t desc(const void* p, int byte) {
  uint64_t addr = (uint32_t)__cvta_generic_to_shared(p) + byte;
  // no swizzle; leading (K) stride 1024 bytes, stride (M or N) 128 bytes
  return ((addr & 0x3FFFF) >> 4) | ((uint64_t)(1024 >> 4) << 16) | ((uint64_t)(128 >> 4) << 32);
}

// mode 0: mma.sync; 1: wgmma, A of registers; 2: wgmma, A of shared memory
template <bool BF>
__global__ void __launch_bounds__(128) tiles(const uint16_t* A, const uint16_t* B, const float* C, float* D, int K, int mode) {
  extern __shared__ __align__(128) uint16_t sm[];
  uint16_t* sb = sm;
  uint16_t* sa = sm + 64 * K;
  size_t t = blockIdx.x;
  const uint16_t* a = A + t * 64 * K;
  const uint16_t* b = B + t * 64 * K;
  for (int i = threadIdx.x; i < 64 * K; i += 128) {
    int r = i / K, k = i % K;
    int at = ((k / 8) * 8 + r / 8) * 64 + (r % 8) * 8 + k % 8;
    sb[at] = b[i];
    sa[at] = a[i];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  float d[32];
  for (int j = 0; j < 8; j++)
    for (int e = 0; e < 4; e++)
      d[j * 4 + e] = C[t * 4096 + (w * 16 + g + (e / 2) * 8) * 64 + j * 8 + q * 2 + (e & 1)];
  auto word = [&](const uint16_t* p, int r, int k) { return *(const uint32_t*)(p + (size_t)r * K + k); };
  if (mode == 0) {
    for (int k = 0; k < K; k += 16) {
      uint32_t f[4] = {word(a, w * 16 + g, k + 2 * q), word(a, w * 16 + g + 8, k + 2 * q),
                       word(a, w * 16 + g, k + 2 * q + 8), word(a, w * 16 + g + 8, k + 2 * q + 8)};
      for (int j = 0; j < 8; j++) mma16<BF>(d + j * 4, f, word(b, j * 8 + g, k + 2 * q), word(b, j * 8 + g, k + 2 * q + 8));
    }
  } else {
    for (int k = 0; k < K; k += 16) {
      uint32_t f[4] = {word(a, w * 16 + g, k + 2 * q), word(a, w * 16 + g + 8, k + 2 * q),
                       word(a, w * 16 + g, k + 2 * q + 8), word(a, w * 16 + g + 8, k + 2 * q + 8)};
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      if (mode == 1) wgmma_rs<BF>(d, f, desc(sb, (k / 8) * 1024));
      else wgmma_ss<BF>(d, desc(sa, (k / 8) * 1024), desc(sb, (k / 8) * 1024));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" : O32(d) :: "memory");
    }
  }
  for (int j = 0; j < 8; j++)
    for (int e = 0; e < 4; e++)
      D[t * 4096 + (w * 16 + g + (e / 2) * 8) * 64 + j * 8 + q * 2 + (e & 1)] = d[j * 4 + e];
}
extern "C" int run(const void* A, const void* B, const void* C, void* D, int tilesN, int K, int mode, int bf) {
  int bytes = 64 * K * 4;
  auto f = bf ? tiles<true> : tiles<false>;
  cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  f<<<tilesN, 128, bytes>>>((const uint16_t*)A, (const uint16_t*)B, (const float*)C, (float*)D, K, mode);
  cudaDeviceSynchronize();
  return (int)cudaGetLastError();
}
