// What a warp multiplies by itself. mma.sync adds as wgmma does: the same products in the same order along K give the
// same bits, whichever instruction computes an element.
#pragma once
#include "../gpu/gpu.h"

// `threads` threads, of whole warps, meet at barrier `id`, of a block's 16; barrier() is the one with number 0.
DEV void meet(int id, int threads) {
  __syncwarp();                                            // lanes may have polled for different times
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same; whether one of them says so.
DEV bool meet_any(int id, int threads, bool says) {
  int any;
  __syncwarp();
  asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0;\n"
               "bar.red.or.pred q, %2, %3, p; selp.s32 %0, 1, 0, q; }"
               : "=r"(any) : "r"((int)says), "r"(id), "r"(threads) : "memory");
  return any;
}

// D[16 x 8] += A[16 x 16] B[16 x 8], all in registers. With lane 4 g + q:
//   A  registers 0, 1: rows g and g + 8, k 2q and 2q + 1; 2, 3: the same at k + 8: a warp's part of wgmma's A
//   B  column g, k 2q and 2q + 1; k + 8
//   D  rows g (d[0], d[1]) and g + 8 (d[2], d[3]) of columns 2q and 2q + 1: a warp's part of wgmma's D
template <int FORMAT> DEV void mma(float* d, const u32* a, u32 b0, u32 b1) {
  if (FORMAT == FORMAT_F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16 bits. Lane l gives the address of row l % 8 of matrix l / 8, and gets of each what is in
// row l / 4, columns 2 (l % 4) and the next.
DEV void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// The same transposed: of each matrix lane l gets rows 2 (l % 4) and the next, column l / 4.
DEV void load_transposed(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
