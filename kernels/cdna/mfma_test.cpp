// Every kernel of every matrix product against float64: packing, all tiles, uneven groups, odd shapes, and sums so long
// that every loop goes round. Inputs that no kernel may read and outputs that none may write are poisoned.
//
//   mfma_test [policy [seed]]
//
// tests/programs/amd.sh runs it with machine code in an emulator, where `policy` chooses how many shapes there are: 0
// is all. With kernels compiled for the SIMT machine it is also the order of threads: 1 random, 2 one wave first.
#include "../gpu/gpu.h"
#include "work.h"
#include "weights.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <initializer_list>
#include <string>
#include <vector>

static int policy = 0, seed = 1, failures = 0, OS_THREADS = 1;
static u64 state = 88172645463325252ull;
static u32 rnd() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (u32)(state >> 20); }
static float uniform_float() { return (float)(rnd() & 0xffff) / 32768.f - 1.f; }
static int round_up(int v, int to) { return (v + to - 1) / to * to; }

template <class Args> static void launch(const std::string& name, int grid, int threads, const Args& args) {
  const simt_kernel kernel = (simt_kernel)dlsym(RTLD_DEFAULT, name.c_str());
  char message[512] = "no such kernel";
  if (kernel &&
      simt_launch(kernel, grid, threads, 0, &args, sizeof args, OS_THREADS, policy, (u64)seed, message, 512) == 0)
    return;
  printf("%s: %s\n", name.c_str(), message);
  exit(1);
}

struct Matrix {
  int groups, n, k;
  bool mxfp4;
  std::vector<float> values;    // [groups][k][n]: a column of K after the other, all rows side by side
  std::vector<u8> wire;
};

static Matrix random_matrix(bool mxfp4, int groups, int n, int k) {
  static const float magnitude[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  Matrix m{groups, n, k, mxfp4, std::vector<float>((size_t)groups * n * k), {}};
  const int tiles = round_up(n, WIRE_ROWS) / WIRE_ROWS;
  const size_t tile_bytes = mxfp4 ? (size_t)WIRE_ROWS * (k / 2 + k / 32) : (size_t)WIRE_ROWS * k * 2;
  m.wire.assign((size_t)groups * tiles * tile_bytes, 0);
  for (int g = 0; g < groups; g++) for (int row = 0; row < n; row++) {
    u8* tile = &m.wire[((size_t)g * tiles + row / WIRE_ROWS) * tile_bytes];
    float* values = &m.values[(size_t)g * k * n + row];
    const int r = row % WIRE_ROWS;
    if (!mxfp4) for (int c = 0; c < k; c++) {
      const u16 bits = to_bf16(uniform_float() * .1f);
      ((u16*)tile)[(size_t)r * k + c] = bits, values[(size_t)c * n] = bf16_to_f32(bits);
    }
    else for (int c = 0; c < k; c++) {
      u8& scale = tile[(size_t)WIRE_ROWS * (k / 2) + (size_t)r * (k / 32) + c / 32];
      if (c % 32 == 0) scale = (u8)(118 + rnd() % 6);
      const u32 code = rnd() % 16;
      tile[(size_t)r * (k / 2) + c / 2] |= (u8)(code << (c % 2 * 4));
      values[(size_t)c * n] = std::ldexp(magnitude[code & 7], scale - 127) * (code & 8 ? -1.f : 1.f);
    }
  }
  return m;
}

struct Case {
  std::string op, act;          // act: f16x1 ...
  bool mxfp4;
  int n, k;
  std::vector<int> counts;      // rows of each group
  int tile = 0, waves = 0;
  int tiles = 0;                // of the grid; 0: two more than the rows fill
  bool cuts = false;            // experts are cut into tiles at random, in a random order
};

struct Input {
  int format, terms;
  int rows;                     // of the buffer
  std::vector<int> offsets;
  std::vector<u16> tiled;
  std::vector<float> values;    // [rows][k], as the terms give them
  i64 term;
  std::vector<int> slot_rows;   // mlp1 in `fast`: where each row lies in `tiled`
};

// Whether a case's rows are read by their index.
static bool indexed(const Case& c) { return c.op == "mlp1" && c.act.back() == '1'; }

static Input random_input(const Case& c) {
  Input in;
  in.format = c.act[0] == 'b' ? FORMAT_BF16 : FORMAT_F16, in.terms = c.act.back() - '0';
  int rows = 0;
  for (const int count : c.counts) in.offsets.push_back(rows), rows = round_up(rows + count, GROUP_ALIGN);
  in.offsets.push_back(rows);
  in.rows = rows + 256;
  in.term = (i64)round_up(c.k, SLAB) * in.rows;
  in.tiled.assign((size_t)(in.term * in.terms), 0x7fff);        // NaN
  in.values.assign((size_t)in.rows * c.k, 0);
  // Those of all groups are mixed.
  if (indexed(c)) {
    in.slot_rows.assign(in.rows, -1);
    std::vector<int> places;
    for (size_t g = 0; g < c.counts.size(); g++) for (int t = 0; t < c.counts[g]; t++)
      places.push_back(in.offsets[g] + t);
    for (size_t g = 0, i = 0; g < c.counts.size(); g++) for (int t = 0; t < c.counts[g]; t++, i++) {
      std::swap(places[i], places[i + rnd() % (places.size() - i)]);
      in.slot_rows[in.offsets[g] + t] = places[i];
    }
  }
  for (size_t g = 0; g < c.counts.size(); g++) for (int t = 0; t < c.counts[g]; t++)
  for (int k = 0; k < round_up(c.k, SLAB); k++) {
    const int row = in.offsets[g] + t, place = indexed(c) ? in.slot_rows[row] : row;
    const float v = k < c.k ? uniform_float() * 2 + uniform_float() * 1e-4f : 0.f;
    u16* at = &in.tiled[(size_t)tiled_index(place, k, in.rows)];
    store_terms(in.format, at, in.term, in.terms, v);
    if (k >= c.k) continue;
    in.values[(size_t)row * c.k + k] = in.terms > 1 ? v : in.format == FORMAT_F16 ? f16_to_f32(*at) : bf16_to_f32(*at);
  }
  return in;
}

static std::vector<u8> pack(const Matrix& m, int format, int shift) {
  const int row_blocks = round_up(m.n, BLOCK_ROWS) / BLOCK_ROWS, k_blocks = round_up(m.k, SLAB) / SLAB;
  std::vector<u8> out((size_t)m.groups * row_blocks * k_blocks * (m.mxfp4 ? 1088 : 4096), 0xff);
  const PackArgs args{m.wire.data(), out.data(), m.groups, m.n, m.k, row_blocks, k_blocks, shift, format, 0};
  launch(m.mxfp4 ? "pack_mxfp4" : "pack_w16", 3, 256, args);
  return out;
}

struct Checker {
  double worst = 0;             // error in units of what is allowed
  int bad = 0;
  void value(double got, double want, double allowed) {
    const double ratio = std::fabs(got - want) / allowed;
    if (!(ratio <= 1)) bad++;
    if (!(ratio <= worst)) worst = ratio;
  }
  void untouched(bool same) { bad += !same; }
};

static double gated(double gate, double up) {
  gate = std::min(gate, 7.0), up = std::min(std::max(up, -7.0), 7.0);
  return gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
}

// Returns a hash of all outputs.
static u64 run(const Case& c) {
  const int groups = (int)c.counts.size(), row_blocks = round_up(c.n, BLOCK_ROWS) / BLOCK_ROWS;
  const bool mlp = c.op[0] == 'm', grouped = mlp, greedy = c.op == "unembed_greedy";
  const Matrix m = random_matrix(c.mxfp4, groups, c.n, c.k);
  const Input in = random_input(c);
  const bool exact = in.terms > 1;
  const int shift = c.mxfp4 ? 3 : 10;      // 10: no weight is subnormal in FP16
  const std::vector<u8> weights = pack(m, in.format, shift);
  std::vector<float> bias((size_t)groups * c.n);
  for (float& b : bias) b = uniform_float();

  const int spans = (row_blocks + c.waves - 1) / c.waves, columns = round_up(c.n / 2, SLAB);
  const u32 poison = 0x7fc0dead;
  std::vector<u32> out((size_t)in.rows * c.n, poison), best((size_t)spans * in.rows, poison), best_index(best);
  std::vector<u32> y((size_t)in.rows * c.n, poison);
  std::vector<u16> tiled((size_t)in.terms * columns * in.rows, 0x7e11);
  std::vector<float> x((size_t)in.rows * c.n);
  if (c.op == "attn_out") for (size_t i = 0; i < x.size(); i++) x[i] = uniform_float(), memcpy(&out[i], &x[i], 4);

  GemmArgs a{};
  a.weights = weights.data(), a.bias = c.op[0] == 'u' ? nullptr : bias.data();
  a.input = in.tiled.data(), a.in_term = in.term, a.slot_rows = in.slot_rows.data();
  a.rows = c.counts.data(), a.offsets = grouped ? in.offsets.data() : nullptr;
  a.out = (float*)out.data(), a.tiled = tiled.data(), a.tiled_term = (i64)columns * in.rows, a.y = y.data();
  a.best = (float*)best.data(), a.best_index = (int*)best_index.data();
  a.groups = groups, a.n = c.n, a.k_blocks = round_up(c.k, SLAB) / SLAB, a.row_blocks = row_blocks, a.in_rows = in.rows;
  a.tiled_rows = in.rows, a.best_rows = in.rows, a.scale = std::ldexp(1.f, -shift), a.limit = 7, a.format = in.format;

  int tiles = 2;
  std::vector<ExpertCut> cuts;
  for (int g = 0; g < groups; g++) {
    const int fewest = (c.counts[g] + c.tile - 1) / c.tile, steps = (c.counts[g] + TOKENS - 1) / TOKENS;
    const int cut = c.cuts ? std::min(steps, fewest + (int)(rnd() % 3)) : fewest;
    cuts.push_back(ExpertCut{g, cut}), tiles += cut;
  }
  for (int g = 0; g < groups; g++) std::swap(cuts[g], cuts[g + rnd() % (groups - g)]);
  if (c.cuts) a.cuts = cuts.data();
  if (c.tiles) tiles = c.tiles;
  const std::string name = c.op + (c.mxfp4 ? "_mxfp4_" : "_w16_") + c.act + "_n" + std::to_string(c.tile);
  launch(name, tiles * spans, c.waves * WAVE, a);

  Checker check;
  std::vector<char> written((size_t)in.rows, 0);
  for (int g = 0; g < groups; g++) for (int t = 0; t < c.counts[g]; t++) {
    const int row = in.offsets[g] + t;
    written[row] = 1;
    std::vector<double> sum(c.n), size(c.n);
    for (int k = 0; k < c.k; k++) {
      const float* column = &m.values[((size_t)g * c.k + k) * c.n];
      const double value = in.values[(size_t)row * c.k + k];
      for (int o = 0; o < c.n; o++) {
        const double p = column[o] * value;
        sum[o] += p, size[o] += std::fabs(p);
      }
    }
    // With one term sums are float32. With more, terms hold 22 or 24 bits of a value, and the sum is rounded once.
    const double unit = exact ? 4e-7 : 4e-6;
    auto f32 = [](u32 bits) { float v; memcpy(&v, &bits, 4); return (double)v; };
    for (int o = 0; o < c.n && !greedy; o++) {
      const size_t at = (size_t)row * c.n + o;
      const double b = a.bias ? bias[(size_t)g * c.n + o] : 0, allowed = unit * (size[o] + 1);
      if (c.op == "mlp2") {
        if (exact) check.value(f32(y[at]), sum[o] + b, allowed);
        else check.value(f16_to_f32(((u16*)y.data())[at]), sum[o] + b, allowed + std::fabs(sum[o] + b) * 1e-3);
      } else if (c.op != "mlp1") check.value(f32(out[at]), sum[o] + b + x[at], allowed);
    }
    for (int o = 0; o < columns && c.op == "mlp1"; o++) {
      const i64 at = tiled_index(row, o, in.rows);
      double got = 0, scale = 1, want = 0, allowed = 1e-30;
      for (int term = 0; term < in.terms; term++, scale /= in.format == FORMAT_F16 ? 2048 : 1) {
        const u16 bits = tiled[(size_t)(term * a.tiled_term + at)];
        got += scale * (in.format == FORMAT_F16 ? f16_to_f32(bits) : bf16_to_f32(bits));
      }
      if (o < c.n / 2) {
        const double gate = sum[2 * o] + bias[(size_t)g * c.n + 2 * o];
        const double up = sum[2 * o + 1] + bias[(size_t)g * c.n + 2 * o + 1];
        want = gated(gate, up);
        allowed = 20 * unit * (size[2 * o] + size[2 * o + 1] + 1);
        if (!exact) allowed += std::fabs(want) * (in.format == FORMAT_F16 ? 6e-4 : 5e-3);
      }
      check.value(got, want, allowed);
    }
    if (greedy) {
      const int per = c.waves * BLOCK_ROWS;
      for (int span = 0; span < spans; span++) {
        const size_t at = (size_t)span * in.rows + row;
        const int index = (int)best_index[at];
        const bool inside = index >= span * per && index < std::min((span + 1) * per, c.n);
        double largest = -1e30;
        for (int o = span * per; o < std::min((span + 1) * per, c.n); o++) largest = std::max(largest, sum[o]);
        if (inside) check.value(f32(best[at]), largest, 1e-4), check.value(sum[index], largest, 1e-4);
        else check.bad++;
      }
    }
  }
  for (int row = 0; row < in.rows; row++) {
    if (written[row]) continue;
    for (int o = 0; o < c.n; o++) {
      const size_t at = (size_t)row * c.n + o;
      if (c.op == "attn_out") check.untouched(memcmp(&out[at], &x[at], 4) == 0);
      else check.untouched(out[at] == poison);
      check.untouched(exact ? y[at] == poison
                            : ((u16*)y.data())[at] == ((u16*)y.data() + (size_t)in.rows * c.n)[at % 2]);
    }
    for (int o = 0; o < columns; o++) check.untouched(tiled[(size_t)tiled_index(row, o, in.rows)] == 0x7e11);
    for (int span = 0; span < spans; span++) check.untouched(best[(size_t)span * in.rows + row] == poison);
  }
  int rows = 0;
  for (const int count : c.counts) rows += count;
  printf("%-36s groups %3d rows %4d n %5d k %4d: %s (worst %.2f of what is allowed)\n", name.c_str(), groups, rows, c.n,
         c.k, check.bad ? "WRONG" : "ok", check.worst);
  failures += check.bad > 0;
  u64 hash = 0;
  auto mix = [&hash](const auto& v) { for (const auto x : v) hash = (hash ^ x) * 0x100000001b3ull; };
  mix(out), mix(y), mix(tiled);
  if (greedy) mix(best), mix(best_index);
  return hash;
}

// mlp1's gated unit of every pair of odd numbers, given as biases: NaN exactly where the float32 baseline has it.
static void run_odd_gates(const char* act, bool mxfp4) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 7.5f, -7.5f, 0.5f}, limit = 7;
  constexpr int COUNT = 8, N = 2 * COUNT * COUNT, K = 64;
  const int count = 20, terms = act[strlen(act) - 1] - '0', format = act[0] == 'b' ? FORMAT_BF16 : FORMAT_F16;
  const Matrix m = random_matrix(mxfp4, 1, N, K);
  const std::vector<u8> weights = pack(m, format, mxfp4 ? 3 : 10);
  const int rows = 256 + GROUP_ALIGN;
  std::vector<u16> zeros((size_t)terms * rows * SLAB), tiled(zeros.size(), 0);
  const std::vector<int> slot_rows(count, 0);
  std::vector<float> bias(N);
  for (int i = 0; i < N; i++) bias[i] = odd[i % 2 ? i / 2 % COUNT : i / 2 / COUNT];
  GemmArgs a{};
  a.weights = weights.data(), a.bias = bias.data(), a.input = zeros.data(), a.in_term = rows * SLAB, a.rows = &count;
  a.tiled = tiled.data(), a.tiled_term = rows * SLAB, a.groups = 1, a.n = N, a.k_blocks = 1;
  a.row_blocks = N / BLOCK_ROWS, a.slot_rows = slot_rows.data();
  a.in_rows = a.tiled_rows = rows, a.scale = 1, a.limit = limit, a.format = format;
  for (const int tile : terms > 1 ? std::vector<int>{16, 64} : std::vector<int>{16, 64, 128}) {
    const std::string name = std::string("mlp1") + (mxfp4 ? "_mxfp4_" : "_w16_") + act + "_n" + std::to_string(tile);
    std::fill(tiled.begin(), tiled.end(), 0x3333);
    launch(name, (count + tile - 1) / tile, 4 * WAVE, a);
    int bad = 0;
    for (int i = 0; i < count * N / 2; i++) {
      const int row = i % count, pair = i / count;
      float gate = bias[2 * pair], up = bias[2 * pair + 1], got = 0, scale = 1;
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
      const float want = gate * (1 / (1 + expf(-1.702f * gate))) * (up + 1);
      for (int term = 0; term < terms; term++, scale /= format == FORMAT_F16 ? 2048 : 1) {
        const u16 bits = tiled[(size_t)(term * a.tiled_term + tiled_index(row, pair, rows))];
        got += scale * (format == FORMAT_F16 ? f16_to_f32(bits) : bf16_to_f32(bits));
      }
      bad += !(std::isnan(want) ? std::isnan(got) : std::fabs(got - want) <= 5e-3f * std::fabs(want) + 6.2e-5f);
    }
    printf("%-36s odd gates: %s\n", name.c_str(), bad ? "WRONG" : "ok");
    failures += bad > 0;
  }
}

// The weights of sort_mlp1's products, for all steps with so many experts.
struct Experts {
  enum { N = 128 };
  const char* act;
  bool mxfp4;
  int count, K;
  std::vector<u8> weights;
  std::vector<float> bias;

  Experts(const char* act, bool mxfp4, int count, int K = 96)
      : act(act), mxfp4(mxfp4), count(count), K(K), bias((size_t)count * N) {
    const int format = act[0] == 'b' ? FORMAT_BF16 : FORMAT_F16;
    weights = pack(random_matrix(mxfp4, count, N, K), format, mxfp4 ? 3 : 10);
    for (float& b : bias) b = uniform_float();
  }
};

struct Steps { int rows, most_rows, k; bool one_expert; };

// sort_mlp1 sorts as SortArgs says, and gives the bits of mlp1 of sorted rows.
static void run_sorting(const Experts& of, const Steps& s) {
  const int N = of.N, K = of.K, picks = s.rows * s.k, row_blocks = N / BLOCK_ROWS, columns = N / 2;
  const bool mxfp4 = of.mxfp4;
  const Input in = random_input({"sort_mlp1", of.act, mxfp4, N, K, {s.rows}});
  // Picks of a row are in order of the expert. Those behind the last row are of an earlier step.
  std::vector<int> experts((size_t)s.most_rows * s.k), wanted(of.count), slots(picks, -1);
  for (int row = 0; row < s.most_rows; row++) {
    std::vector<int> all(of.count);
    for (int e = 0; e < of.count; e++) all[e] = e;
    for (int i = 0; i < s.k && !s.one_expert; i++) std::swap(all[i], all[i + rnd() % (of.count - i)]);
    if (s.one_expert) std::rotate(all.begin(), all.end() - s.k, all.end());
    std::sort(all.begin(), all.begin() + s.k);
    std::copy(all.begin(), all.begin() + s.k, experts.begin() + row * s.k);
    for (int i = 0; i < s.k && row < s.rows; i++) wanted[all[i]]++;
  }
  std::vector<int> counts(of.count, -1), offsets(of.count + 1, -1);
  const int room = picks + of.count * (GROUP_ALIGN - 1), sorted_rows = round_up(room + 256, GROUP_ALIGN);
  std::vector<u16> tiled((size_t)columns * sorted_rows, 0x7e11), sorted(tiled);
  StepHeader header{};
  header.rows = s.rows;
  GemmArgs a{};
  a.weights = of.weights.data(), a.bias = of.bias.data(), a.input = in.tiled.data(), a.in_term = in.term;
  a.tiled = tiled.data(), a.tiled_term = (i64)columns * sorted_rows, a.groups = of.count, a.n = N;
  a.k_blocks = round_up(K, SLAB) / SLAB, a.row_blocks = row_blocks, a.in_rows = in.rows, a.tiled_rows = sorted_rows;
  a.scale = std::ldexp(1.f, mxfp4 ? -3 : -10), a.limit = 7, a.format = in.format;
  SortMlp1Args both{};
  both.product = a, both.sort.step.header = &header, both.most_rows = s.most_rows;
  both.sort.experts = experts.data(), both.sort.offsets = offsets.data(), both.sort.counts = counts.data();
  both.sort.slots = slots.data(), both.sort.n_experts = of.count, both.sort.k = s.k;
  const std::string rest = std::string(mxfp4 ? "_mxfp4_" : "_w16_") + of.act + "_n16";
  const int spans = (row_blocks + 3) / 4;
  launch("sort_mlp1" + rest, 1 + std::min(s.most_rows * s.k, of.count) * spans, 4 * WAVE, both);

  int bad = counts != wanted || offsets[0] != 0;
  for (int e = 0; e < of.count; e++)
    bad += offsets[e] % GROUP_ALIGN || offsets[e + 1] < offsets[e] + counts[e] || offsets[e] + counts[e] > room;
  std::vector<int> next(offsets);
  for (int pair = 0; pair < picks; pair++) bad += slots[pair] != next[experts[pair]]++;
  if (!bad) {
    std::vector<int> slot_rows(sorted_rows, -1);
    for (int pair = 0; pair < picks; pair++) slot_rows[slots[pair]] = pair / s.k;
    a.slot_rows = slot_rows.data(), a.tiled = sorted.data();
    a.rows = counts.data(), a.offsets = offsets.data();
    launch("mlp1" + rest, picks * spans, 4 * WAVE, a);
    bad += tiled != sorted;
  }
  printf("%-36s experts %3d rows %2d of %2d k %d: %s\n", ("sort_mlp1" + rest).c_str(), of.count, s.rows, s.most_rows,
         s.k, bad ? "WRONG" : "ok");
  failures += bad > 0;
}

// qkv_store gives the bits of qkv and rope_store, in every tile, and touches nothing else. Three sequences share the
// rows.
static void run_store(const char* act, int rows) {
  enum { DIM = 64, HEADS = 5, KV_HEADS = 2, N = DIM * (HEADS + 2 * KV_HEADS), K = 96, POSITIONS = 200, PAGES = 16 };
  const Input in = random_input({"qkv_store", act, false, N, K, {rows}});
  const std::vector<u8> weights = pack(random_matrix(false, 1, N, K), in.format, 10);
  std::vector<float> bias(N), angles(2 * POSITIONS * DIM / 2), sums((size_t)in.rows * N);
  for (float& b : bias) b = uniform_float();
  for (float& angle : angles) angle = uniform_float();
  StepHeader header{};
  header.rows = rows;
  std::vector<int> positions(rows), row_chunk(rows), tables(PAGES);
  std::vector<ChunkInfo> chunks(3);
  for (int page = 0; page < PAGES; page++) tables[page] = (page * 7 + 3) % PAGES;
  for (int c = 0; c < 3; c++) {
    const int first = rows * c / 3;
    chunks[c] = ChunkInfo{first, rows * (c + 1) / 3 - first, 0, 0, 4 * c, 0, 1, 0};
    for (int i = 0; i < chunks[c].rows; i++) positions[first + i] = 13 * c + i, row_chunk[first + i] = c;
  }

  GemmArgs a{};
  a.weights = weights.data(), a.bias = bias.data(), a.input = in.tiled.data(), a.in_term = in.term, a.rows = &rows;
  a.out = sums.data(), a.groups = 1, a.n = N, a.k_blocks = round_up(K, SLAB) / SLAB, a.row_blocks = N / BLOCK_ROWS;
  a.in_rows = in.rows, a.scale = std::ldexp(1.f, -10), a.format = in.format, a.half = DIM / 2;
  RopeStoreArgs store{};
  store.step.header = &header, store.step.positions = positions.data(), store.step.row_chunk = row_chunk.data();
  store.step.chunks = chunks.data(), store.step.tables = tables.data();
  store.qkv = sums.data(), store.cos = angles.data(), store.sin = angles.data() + POSITIONS * DIM / 2;
  store.head_bytes = 2 * KV_PAGE * DIM * 2 + 768, store.page_bytes = store.head_bytes * KV_HEADS;
  store.format = in.format, store.head_dim = DIM, store.heads = HEADS, store.kv_heads = KV_HEADS, store.paired = 1;
  const std::vector<u16> poison((size_t)in.rows * HEADS * DIM, 0x7e11);
  const std::vector<u8> poisoned_pages((size_t)PAGES * store.page_bytes, 0x5a);
  std::vector<u16> want_q(poison), q(poison);
  std::vector<u8> want_kv(poisoned_pages), kv(poisoned_pages);
  const std::string rest = std::string("_w16_") + act + "_n";
  launch("qkv" + rest + "128", (rows + 127) / 128 * ((a.row_blocks + 3) / 4), 4 * WAVE, a);
  store.q = want_q.data(), store.kv = want_kv.data();
  launch("rope_store", rows, 320, store);

  struct Blocks { int tokens, waves; };
  for (const Blocks& tile : {Blocks{16, 1}, Blocks{64, 2}, Blocks{128, 4}}) {
    if (tile.tokens == 16 && rows > 16) continue;
    q = poison, kv = poisoned_pages;
    store.q = q.data(), store.kv = kv.data(), store.qkv = nullptr, a.out = nullptr;
    const int tiles = (rows + tile.tokens - 1) / tile.tokens + (tile.tokens > 16);
    const std::string name = "qkv_store" + rest + std::to_string(tile.tokens);
    launch(name, tiles * ((a.row_blocks + tile.waves - 1) / tile.waves), tile.waves * WAVE, QkvStoreArgs{a, store});
    const bool bad = q != want_q || kv != want_kv;
    printf("%-36s rows %4d: %s\n", name.c_str(), rows, bad ? "WRONG" : "ok");
    failures += bad;
  }
}

// norm_route_rows gives the bits of rmsnorm and route, and touches nothing else.
static void run_norm_route(const char* act, int rows, int hidden, int experts, int k) {
  const int format = act[0] == 'b' ? FORMAT_BF16 : FORMAT_F16, slabs = round_up(hidden, SLAB) / SLAB, t_rows = rows + 9;
  StepHeader header{};
  header.rows = rows;
  std::vector<float> x((size_t)rows * hidden), weight(hidden), bias(experts), t32(x.size()), shares((size_t)rows * k);
  std::vector<u16> router((size_t)experts * hidden), t((size_t)slabs * t_rows * SLAB, 0x7e11);
  std::vector<int> picks((size_t)rows * k, -1);
  for (float& v : x) v = uniform_float();
  for (float& v : weight) v = 1 + .2f * uniform_float();
  for (float& v : bias) v = uniform_float();
  for (u16& v : router) v = to_bf16(uniform_float());
  NormRouteArgs a{};
  a.norm.step.header = a.route.step.header = &header;
  a.norm.x = x.data(), a.norm.weight = weight.data(), a.norm.t = t.data(), a.norm.t32 = t32.data();
  a.norm.hidden = hidden, a.norm.t_rows = t_rows, a.norm.terms = 1, a.norm.format = format;
  a.route.t32 = t32.data(), a.route.w = router.data(), a.route.bias = bias.data();
  a.route.experts = picks.data(), a.route.shares = shares.data(), a.route.format = FORMAT_BF16;
  a.route.hidden = hidden, a.route.n_experts = experts, a.route.k = k;
  launch("rmsnorm", rows, 384, a.norm);
  launch("route", (rows + 3) / 4, 8 * WAVE, a.route);
  const std::vector<u16> want_t(t);
  const std::vector<int> want_picks(picks);
  const std::vector<float> want_shares(shares), want_x(x);
  std::fill(t.begin(), t.end(), 0x7e11), std::fill(picks.begin(), picks.end(), -1);
  std::fill(shares.begin(), shares.end(), 0.f);
  a.norm.t32 = nullptr, a.route.t32 = nullptr;
  launch("norm_route_rows", (rows + 3) / 4 + 1, 8 * WAVE, a);
  const bool bad = t != want_t || picks != want_picks || shares != want_shares || x != want_x;
  printf("%-36s rows %4d hidden %4d experts %3d k %d: %s\n", "norm_route_rows", rows, hidden, experts, k,
         bad ? "WRONG" : "ok");
  failures += bad;
}

// die_order is a permutation, and of each round of all dies neighbours are on one.
static void run_die_order() {
  int bad = 0;
  for (const int dies : {1, 8}) for (const int neighbours : {1, 2, 8, 15})
  for (const int blocks : {1, 63, 64, 600, 721}) {
    std::vector<int> id_of(blocks, -1);
    for (int id = 0; id < blocks; id++) {
      const int number = die_order(id, blocks, neighbours, dies);
      if (number < 0 || number >= blocks || id_of[number] >= 0) bad++;
      else id_of[number] = id;
    }
    const int rounds = blocks - blocks % (neighbours * dies);
    for (int number = 0; number < rounds; number++)
      bad += id_of[number] % dies != id_of[number - number % neighbours] % dies;
    for (int number = rounds; number < blocks; number++) bad += id_of[number] != number;
  }
  printf("%-36s %s\n", "die_order", bad ? "WRONG" : "ok");
  failures += bad > 0;
}

struct Tile { int tokens, waves, tiles = 0; bool cuts = false; };

// Every tile gives the same bits: a token's result depends on the token alone.
static void run_tiles(Case c, const std::vector<Tile>& tiles) {
  const u64 same_data = state;
  u64 first = 0;
  for (const Tile& tile : tiles) {
    state = same_data, c.tile = tile.tokens, c.waves = tile.waves, c.tiles = tile.tiles, c.cuts = tile.cuts;
    const u64 hash = run(c);
    if (first && hash != first) printf("%s: other bits in tiles of %d\n", c.op.c_str(), c.tile), failures++;
    first = hash;
  }
}

// Rows or picks to test. In order all of them; in other orders, where a missing barrier shows in any whole block, every
// third.
static std::vector<int> some(const std::vector<int>& all) {
  std::vector<int> found;
  for (size_t i = 0; i < all.size(); i += policy == SIMT_IN_ORDER ? 1 : 3) found.push_back(all[i]);
  return found;
}

// A sum's length, of more slabs than any kernel has on its way or in one round of its loop, twice.
enum { LONG = 960 };
static_assert(LONG / SLAB > 2 * (int)Mxfp4<FORMAT_F16>::STREAM_DEPTH, "a stream goes round twice");

int main(int argc, char** argv) {
  if (argc > 1) policy = atoi(argv[1]);
  if (argc > 2) seed = atoi(argv[2]), state += (u64)seed * 7919;
  run_die_order();
  for (const char* act : {"f16x1", "bf16x1", "f16x2", "bf16x3"}) {
    const bool exact = std::string(act).back() != '1';
    std::vector<Tile> four_waves = {{16, 4}, {64, 4}};
    if (!exact) four_waves.push_back({128, 4});
    std::vector<Tile> of_experts(four_waves);
    if (!exact) of_experts.push_back({64, 4, 0, true}), of_experts.push_back({128, 4, 0, true});
    // In `fast` rows of larger tiles are spread over all tiles of the grid: full ones, uneven ones, and more than there
    // are steps of 16.
    const std::vector<Tile> dense = exact
        ? std::vector<Tile>{{16, 1}, {64, 4}}
        : std::vector<Tile>{{16, 1}, {64, 2, 4}, {64, 2, 7}, {128, 4, 2}, {128, 4, 3}, {128, 4, 13}};
    for (const bool mxfp4 : {true, false}) {
      run_tiles({"mlp1", act, mxfp4, 320, 192, {125, 0, 100, 5, 1}}, of_experts);
      run_tiles({"mlp2", act, mxfp4, 160, 320, {90, 75, 0, 17, 300}}, of_experts);
      run_tiles({"mlp1", act, mxfp4, 128, 32, {0, 3, 0, 1}}, of_experts);
      run_tiles({"mlp2", act, mxfp4, 32, 64, {0, 3, 0, 1}}, of_experts);
      run_tiles({"mlp1", act, mxfp4, 128, LONG, {20, 0, 3}}, of_experts);
      run_tiles({"mlp2", act, mxfp4, 128, LONG - 32, {3, 70}}, of_experts);
    }
    for (const bool mxfp4 : {true, false}) run_odd_gates(act, mxfp4);
    for (const bool mxfp4 : {true, false}) if (!exact) {
      for (const int count : {5, 32, 128, 256}) {
        const Experts experts(act, mxfp4, count);
        for (const int rows : some({1, 2, 3, 5, 16, 17, 40, 63, 64})) {
          const int k = 1 + (int)(rnd() % (u32)std::min(count, 8));
          run_sorting(experts, {rows, round_up(rows, 4), k, false});
        }
        if (count != 32) continue;
        for (const int k : some({1, 2, 3, 4, 5, 6, 7, 8})) run_sorting(experts, {11, 16, k, false});
        for (const int rows : some({2, 16, 17, 64})) run_sorting(experts, {rows, 64, 1, true});
      }
      run_sorting({act, mxfp4, 9}, {33, 48, 8, true});
      run_sorting({act, mxfp4, 5, LONG}, {7, 8, 2, false});
    }
    if (!exact) for (const int rows : {1, 16, 45, 150}) run_store(act, rows);
    if (!exact) for (const int rows : {1, 4, 7, 18}) {
      const int experts = rows == 7 ? 5 : rows == 18 ? 130 : 32;
      run_norm_route(act, rows, rows == 4 ? 3072 : rows == 7 ? 104 : 2880, experts, rows == 18 ? 8 : 4);
    }
    std::vector<int> many(128);
    for (int& count : many) count = rnd() % 5 ? 0 : (int)(rnd() % 40);
    run_tiles({"mlp1", act, true, 64, 64, many}, of_experts);
    for (const int rows : some({0, 1, 15, 33, 50, 64, 97, 128, 150, 221, 250})) {
      run_tiles({"qkv", act, false, 168, 256, {rows}}, dense);
      run_tiles({"attn_out", act, false, 100, 448, {rows}}, dense);
      run_tiles({"unembed_logits", act, false, 136, 64, {rows}}, four_waves);
      run_tiles({"unembed_greedy", act, false, 203, 192, {rows}}, four_waves);
    }
    // Steps of the bucket of 1,024 rows in the grids of the 20b on 104 compute units.
    for (const int rows : exact ? std::vector<int>{} : std::vector<int>{775, 890})
      run_tiles({"qkv", act, false, 150, 64, {rows}}, {{16, 1}, {128, 4, 9}, {128, 4, 10}});
  }
  printf("%s\n", failures ? "FAILED" : "all right");
  return failures != 0;
}
