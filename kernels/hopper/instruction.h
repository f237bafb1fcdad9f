// wgmma: D[64 x N] = A[64 x 16] B[16 x N] + (accumulate ? D : 0), asynchronously, by a warpgroup.
//
//   A  weights: four registers per thread (a16), or a descriptor of shared memory (d16)
//   B  tokens: a descriptor of shared memory, N rows of 16 elements along K
//   D  thread (warp w, lane 4 g + q) has, for j = 0 .. N/8 - 1, rows 16 w + g (d[4j], d[4j+1]) and 16 w + g + 8
//      (d[4j+2], d[4j+3]) of columns 8 j + 2 q and 8 j + 2 q + 1
#pragma once
#include "../gpu/gpu.h"

// Compile-time arguments of a lambda.
template <bool B> struct Flag { enum : bool { value = B }; };
template <int N> struct Count { enum : int { value = N }; };

// Accumulators of M blocks of 64 rows.
template <int M, int COUNT> DEV void clear(float (&sum)[M][COUNT]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum[m][i] = {};
}

// The first N/2 operands of the assembly, and their bindings: eight columns are four registers.
#define WGMMA_D8 "%0, %1, %2, %3"
#define WGMMA_D16 WGMMA_D8 ", %4, %5, %6, %7"
#define WGMMA_D24 WGMMA_D16 ", %8, %9, %10, %11"
#define WGMMA_D32 WGMMA_D24 ", %12, %13, %14, %15"
#define WGMMA_D40 WGMMA_D32 ", %16, %17, %18, %19"
#define WGMMA_D48 WGMMA_D40 ", %20, %21, %22, %23"
#define WGMMA_D56 WGMMA_D48 ", %24, %25, %26, %27"
#define WGMMA_D64 WGMMA_D56 ", %28, %29, %30, %31"
#define WGMMA_D72 WGMMA_D64 ", %32, %33, %34, %35"
#define WGMMA_D80 WGMMA_D72 ", %36, %37, %38, %39"
#define WGMMA_D88 WGMMA_D80 ", %40, %41, %42, %43"
#define WGMMA_D96 WGMMA_D88 ", %44, %45, %46, %47"
#define WGMMA_D104 WGMMA_D96 ", %48, %49, %50, %51"
#define WGMMA_D112 WGMMA_D104 ", %52, %53, %54, %55"
#define WGMMA_D120 WGMMA_D112 ", %56, %57, %58, %59"
#define WGMMA_D128 WGMMA_D120 ", %60, %61, %62, %63"
#define WGMMA_D136 WGMMA_D128 ", %64, %65, %66, %67"
#define WGMMA_D144 WGMMA_D136 ", %68, %69, %70, %71"
#define WGMMA_D152 WGMMA_D144 ", %72, %73, %74, %75"
#define WGMMA_D160 WGMMA_D152 ", %76, %77, %78, %79"
#define WGMMA_D168 WGMMA_D160 ", %80, %81, %82, %83"
#define WGMMA_D176 WGMMA_D168 ", %84, %85, %86, %87"
#define WGMMA_D184 WGMMA_D176 ", %88, %89, %90, %91"
#define WGMMA_D192 WGMMA_D184 ", %92, %93, %94, %95"
#define WGMMA_D200 WGMMA_D192 ", %96, %97, %98, %99"
#define WGMMA_D208 WGMMA_D200 ", %100, %101, %102, %103"
#define WGMMA_D216 WGMMA_D208 ", %104, %105, %106, %107"
#define WGMMA_D224 WGMMA_D216 ", %108, %109, %110, %111"
#define WGMMA_D232 WGMMA_D224 ", %112, %113, %114, %115"
#define WGMMA_D240 WGMMA_D232 ", %116, %117, %118, %119"
#define WGMMA_D248 WGMMA_D240 ", %120, %121, %122, %123"
#define WGMMA_D256 WGMMA_D248 ", %124, %125, %126, %127"
#define WGMMA_O8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_O16 WGMMA_O8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_O24 WGMMA_O16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_O32 WGMMA_O24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_O40 WGMMA_O32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_O48 WGMMA_O40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_O56 WGMMA_O48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_O64 WGMMA_O56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_O72 WGMMA_O64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_O80 WGMMA_O72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_O88 WGMMA_O80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_O96 WGMMA_O88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_O104 WGMMA_O96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_O112 WGMMA_O104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_O120 WGMMA_O112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_O128 WGMMA_O120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_O136 WGMMA_O128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_O144 WGMMA_O136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_O152 WGMMA_O144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_O160 WGMMA_O152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_O168 WGMMA_O160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_O176 WGMMA_O168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_O184 WGMMA_O176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_O192 WGMMA_O184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_O200 WGMMA_O192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_O208 WGMMA_O200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_O216 WGMMA_O208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_O224 WGMMA_O216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_O232 WGMMA_O224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_O240 WGMMA_O232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_O248 WGMMA_O240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_O256 WGMMA_O248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

template <int FORMAT, int N> struct Wgmma;

// I0 to I5: numbers of the asm operands after D.
#define WGMMA_TYPE(FORMAT, TYPE, N, I0, I1, I2, I3, I4, I5)                                                            \
  template <> struct Wgmma<FORMAT, N> {                                                                                \
    static DEV void a16(float* d, const u32* a, u64 b, int accumulate) {                                               \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I5 ", 0;"                                                       \
                   " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "},"               \
                   " {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, 0; }"                                \
                   : WGMMA_O##N                                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
    }                                                                                                                  \
    static DEV void d16(float* d, u64 a, u64 b, int accumulate) {                                                      \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I2 ", 0;"                                                       \
                   " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "},"               \
                   " %" #I0 ", %" #I1 ", p, 1, 1, 0, 0; }"                                                             \
                   : WGMMA_O##N                                                                                        \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                 \
    }                                                                                                                  \
  };
#define WGMMA_SHAPE(N, I0, I1, I2, I3, I4, I5)                        \
  WGMMA_TYPE(FORMAT_F16, "f16", N, I0, I1, I2, I3, I4, I5)            \
  WGMMA_TYPE(FORMAT_BF16, "bf16", N, I0, I1, I2, I3, I4, I5)

WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9)
WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13)
WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17)
WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21)
WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25)
WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29)
WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33)
WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41)
WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45)
WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49)
WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53)
WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57)
WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61)
WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65)
WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69)
WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73)
WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77)
WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81)
WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85)
WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89)
WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93)
WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97)
WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101)
WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117)
WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133)

// Registers of D and A may be accessed only before the fence and after the wait: fence before the first wgmma, commit
// after the last one of a group, then wait until at most PENDING groups are in flight.
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The descriptor of an operand in shared memory with the 128-byte swizzle: rows of 64 elements (128 bytes), eight
// pieces each, piece p at position p ^ (row % 8); eight rows are 1024 bytes. Sixteen elements along K are 32 bytes: +
// 2.
DEV u64 wgmma_descriptor(u32 shared) {
  const u32 uniform = (u32)shfl((int)(shared >> 4 | 1u << 16), 0);      // known to be uniform: in a uniform register
  return (u64)(1024 / 16 | 1u << 30) << 32 | uniform;
}
