// What one_launch.hip and one_launch_test.cpp have in common.
#pragma once

constexpr int WIDTH = 256;          // values of a vector: four for each lane of a wave
constexpr int ROWS = 4;             // of each vector a wave computes so many
constexpr int BLOCK_THREADS = 256;  // four waves
constexpr int BLOCKS = WIDTH / ROWS / (BLOCK_THREADS / 64);
constexpr int BUFFERS = 3;
constexpr unsigned UNWRITTEN = ~0u;  // a NaN; of values there is one NaN alone
constexpr unsigned NAN_BITS = 0x7fc00000;

struct ChainArgs {
  const float* x;          // WIDTH
  const float* weights;    // phases x WIDTH x WIDTH
  unsigned* buffers;       // BUFFERS x WIDTH, all UNWRITTEN
  unsigned* next_buffers;  // those of the next launch, which are made so
  float* y;                // WIDTH
  int phases;              // two a layer
};
