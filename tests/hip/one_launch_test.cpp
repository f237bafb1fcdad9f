// Runs one_launch.hip as steps that follow each other and compares the last one's values with those of a plain loop, to
// the bit. Prints "the same", what differs, or the fault.
//
// one_launch_test TARGET OBJECT [nan]: nan: of the first values one is a NaN, and that which UNWRITTEN is.
#include "one_launch.h"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>

#include "emulator/launch.h"

using namespace emulator;

namespace {

constexpr int STEPS = 3, PHASES = 12;

using Vector = std::vector<float>;

Vector randoms(size_t count, float most) {
  static std::minstd_rand random(1);
  std::uniform_real_distribution<float> values(-most, most);
  Vector made(count);
  for (float& value : made) value = values(random);
  return made;
}

float dot(const float* row, const Vector& x) {
  float lanes[LANES];
  for (int lane = 0; lane < LANES; lane++) {
    float sum = 0;
    for (int i = 4 * lane; i < 4 * lane + 4; i++) sum = std::fma(row[i], x[static_cast<size_t>(i)], sum);
    lanes[lane] = sum;
  }
  for (int step = LANES / 2; step; step /= 2) {
    for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
  }
  return lanes[0];
}

Vector step(const Vector& x, const Vector& weights) {
  Vector residual = x, before = x;
  for (int phase = 0; phase < PHASES; phase++) {
    Vector made(WIDTH);
    for (size_t row = 0; row < WIDTH; row++) {
      const float v = dot(&weights[(static_cast<size_t>(phase) * WIDTH + row) * WIDTH], before);
      made[row] = phase % 2 == 1 ? residual[row] += v : v < 0 ? v / 4 : v;
    }
    before = made;
  }
  return before;
}

// Memory of the device, poisoned as it comes: UNWRITTEN.
template <class T>
T* on_device(Memory& memory, size_t count) {
  auto* at = static_cast<T*>(take_pages(sizeof(T) * count));
  memory.add({reinterpret_cast<u64>(at), sizeof(T) * count, 0, true});
  return at;
}
float* copy(Memory& memory, const Vector& from) {
  auto* at = on_device<float>(memory, from.size());
  std::copy(from.begin(), from.end(), at);
  return at;
}

std::string outcome(Program& program, bool nan) {
  Vector x = randoms(WIDTH, 1);
  if (nan) x[5] = bit_cast<float>(UNWRITTEN);
  const Vector weights = randoms(size_t{PHASES} * WIDTH * WIDTH, 0.1f);
  Memory memory;
  memory.add({reinterpret_cast<u64>(program.image), program.bytes, ANY_DEVICE, false});
  unsigned* buffers[2] = {on_device<unsigned>(memory, BUFFERS * WIDTH), on_device<unsigned>(memory, BUFFERS * WIDTH)};
  float* values[2] = {copy(memory, x), on_device<float>(memory, WIDTH)};
  ChainArgs arguments{nullptr, copy(memory, weights), nullptr, nullptr, nullptr, PHASES};
  for (int i = 0; i < STEPS; i++) {
    arguments.x = values[i % 2];
    arguments.y = values[1 - i % 2];
    arguments.buffers = buffers[i % 2];
    arguments.next_buffers = buffers[1 - i % 2];
    const auto* bytes = reinterpret_cast<const u8*>(&arguments);
    try {
      run({&program.kernels.at("chain"), 0, BLOCKS, BLOCK_THREADS, 0, {bytes, bytes + sizeof arguments}}, memory, {0});
    } catch (const Fault& fault) {
      return fault.what();
    }
    x = step(x, weights);
  }
  for (size_t i = 0; i < WIDTH; i++) {
    const float found = arguments.y[i];
    if (std::isnan(x[i]) ? std::isnan(found) : bit_cast<u32>(x[i]) == bit_cast<u32>(found)) continue;
    return "differs: value " + std::to_string(i) + " is " + std::to_string(found) + ", and not " + std::to_string(x[i]);
  }
  return "the same";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 1;
  std::ifstream file(argv[2], std::ios::binary);
  Program* program = load_program(std::string(std::istreambuf_iterator<char>(file), {}), argv[1]);
  if (!program) return 1;
  std::printf("%s\n", outcome(*program, argc > 3).c_str());
}
