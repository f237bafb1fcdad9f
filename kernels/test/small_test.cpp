// The small and the plain kernels on the emulated SIMT machine, against float64. tests/programs/simt.sh builds it.
//
// small_test [ORDER [NAME]]: every case, or those of one name, in order, in random order and one wave first, or in one
// of these alone. Outputs are NaN before each run, and a guard behind each buffer must stay unchanged.
#include "../gpu/gpu.h"
#include "../wire.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>
#include <climits>
#include <algorithm>

// None where every access is looked up, as a guard would hide those behind a buffer.
#ifndef GUARD
#define GUARD 64
#endif

#define KERNELS(X) X(upload) X(embed) X(rmsnorm) X(route) X(norm_route) X(sort) X(gather) X(sort_gather) X(rope_store) X(argmax) X(argmax_logits) X(draw) X(draw_wide) X(score) \
  X(range) X(plain_qkv) X(plain_attn_out) X(plain_mlp1) X(plain_mlp2) X(plain_logits) X(attention_plain_f32) \
  X(attention_plain_f16) X(attention_plain_bf16)
#define DECLARE(name) extern "C" void name(const void*);
KERNELS(DECLARE)

namespace {
std::mt19937_64 engine(1);
int failures, checks;
int policy = SIMT_RANDOM;

int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
float real(float deviation = 1) { return std::normal_distribution<float>(0, deviation)(engine); }
void check(bool good, const char* what, double detail = 0) {
  checks++;
  if (!good && ++failures < 40) printf("WRONG %s (%g)\n", what, detail);
}
template <class T> struct Buffer : std::vector<T> {          // with a guard behind it
  explicit Buffer(size_t n = 0) { renew(n); }
  void renew(size_t n) { this->resize(n + GUARD); poison(); }
  void poison() { memset(this->data(), 0xff, this->size() * sizeof(T)); }
  size_t count() const { return this->size() - GUARD; }
  bool whole() const {
    const unsigned char* at = (const unsigned char*)(this->data() + count());
    return std::all_of(at, at + GUARD * sizeof(T), [](unsigned char b) { return b == 0xff; });
  }
};
template <class T> Buffer<T> filled(size_t n, std::function<T()> make) {
  Buffer<T> b(n);
  for (size_t i = 0; i < n; i++) b[i] = make();
  return b;
}
template <class Args>
void launch(const char* name, simt_kernel kernel, int grid, int threads, const Args& args, int shared_bytes = 0) {
  char message[256];
  if (simt_launch(kernel, grid, threads, shared_bytes, &args, sizeof args, 2, policy, engine(), message, sizeof message))
    check(false, (std::string(name) + ": " + message).c_str());
}
#define LAUNCH(name, grid, threads, args) launch(#name, name, grid, threads, args)
#define LAUNCH_WIDE(grid, args) launch("draw_wide", draw_wide, grid, 512, args, 63816)

// A step of random chunks over scattered pages.
struct Plan {
  int window, ring, pages = 0;
  StepHeader header{};
  std::vector<int> tokens, positions, row_chunk, tables, last_tokens;
  std::vector<ChunkInfo> chunks;
  std::vector<LogitsRowInfo> logits;
  Step step{};
  Plan(int n_chunks, int most_rows, int longest, int vocab, int window) : window(window), ring(window / KV_PAGE + 2 + (most_rows + 63) / 64) {
    std::vector<std::vector<int>> full, rings;
    for (int c = 0; c < n_chunks; c++) {
      const int rows = integer(1, most_rows), first = integer(0, longest - rows), used = (first + rows + 63) / 64;
      ChunkInfo chunk{(int)tokens.size(), rows, first, c, (int)tables.size(), (int)tables.size() + used, ring, 0};
      for (int i = 0; i < used + ring; i++) tables.push_back(pages++);
      for (int i = 0; i < rows; i++) {
        tokens.push_back(integer(0, 3) ? integer(0, vocab - 1) : -1 - c);
        positions.push_back(first + i);
        row_chunk.push_back(c);
      }
      if (integer(0, 3)) logits.push_back({(int)tokens.size() - 1, integer(0, 4) ? c : -1, 0, 0, 0, 0, -1, -1});
      chunks.push_back(chunk);
      last_tokens.push_back(integer(0, vocab - 1));
    }
    std::shuffle(tables.begin(), tables.end(), engine);
    header.rows = tokens.size(), header.chunks = n_chunks, header.logits_rows = logits.size(), header.turn = integer(0, 2);
    step.header = &header, step.tokens = tokens.data(), step.positions = positions.data();
    step.row_chunk = row_chunk.data(), step.chunks = chunks.data(), step.tables = tables.data();
    step.logits = logits.data(), step.last_tokens = last_tokens.data();
  }
  int rows() const { return header.rows; }
  int page(int row, int position, bool windowed) const {
    const ChunkInfo& c = chunks[row_chunk[row]];
    return tables[windowed ? c.window + position / KV_PAGE % ring : c.full + position / KV_PAGE];
  }
};

double from_terms(const Buffer<u16>& b, i64 at, i64 term, int terms, int format) {
  double v = 0;
  for (int i = terms - 1; i >= 0; i--) {
    const u16 t = b[at + i * term];
    v = (format == FORMAT_F16 ? f16_to_f32(t) : bf16_to_f32(t)) + v * (format == FORMAT_F16 ? ldexp(1, -TERM_SHIFT) : 1);
  }
  return v;
}
double term_error(int terms, int format) {
  return format == FORMAT_F16 ? (terms == 1 ? 6e-4 : 3e-7) : terms == 1 ? 5e-3 : terms == 2 ? 2e-5 : 1e-7;
}
// The absolute error of a single FP16 term: where the matrix cores flush subnormals, a subnormal becomes 0.
double term_floor(int terms, int format) { return format == FORMAT_F16 && terms == 1 && TERM_SHIFT != 0 ? 0x1p-14 : 0; }
void near(double got, double want, double relative, double absolute, const char* what) {
  check(fabs(got - want) <= relative * fabs(want) + absolute || (std::isnan(got) && std::isnan(want)), what, got - want);
}
int slabs(int width) { return (width + SLAB - 1) / SLAB; }
int format_of_16() { return integer(0, 1) ? FORMAT_F16 : FORMAT_BF16; }
template <class T> T round_up(T v, T to) { return (v + to - 1) / to * to; }

struct Wide {                       // values, and the same in the kernel's format
  int format;
  Buffer<float> wide;
  Buffer<u16> narrow;
  std::vector<double> exact;
  const void* data() const { return format == FORMAT_F32 ? (const void*)wide.data() : narrow.data(); }
  Wide(size_t n, int format, float deviation = 1) : format(format), wide(format == FORMAT_F32 ? n : 0), narrow(format == FORMAT_F32 ? 0 : n) {
    for (size_t i = 0; i < n; i++) {
      const float v = real(deviation);
      if (format == FORMAT_F32) wide[i] = v;
      else narrow[i] = format == FORMAT_F16 ? to_f16(v) : to_bf16(v);
      exact.push_back(format == FORMAT_F32 ? v : format == FORMAT_F16 ? f16_to_f32(narrow[i]) : bf16_to_f32(narrow[i]));
    }
  }
};

double e2m1(int code) {
  const double magnitudes[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}
// Tiles of MXFP4 rows, and what they are. `code` and `scale` give those of a row and a column.
struct Codes {
  Buffer<unsigned char> bytes;
  std::vector<double> exact;
  Codes(int rows, int cols, const std::function<int(int, int)>& code, const std::function<int(int, int)>& scale)
      : bytes(rows / WIRE_ROWS * WireCodes{cols}.tile_bytes()) {
    const WireCodes tile{cols};
    std::fill(bytes.begin(), bytes.begin() + bytes.count(), 0);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++) {
        unsigned char* at = &bytes[r / WIRE_ROWS * tile.tile_bytes()];
        const int bits = code(r, c), exponent = scale(r, c);
        at[tile.code(r % WIRE_ROWS, c)] |= bits << c % 2 * 4;
        at[tile.scale(r % WIRE_ROWS, c)] = exponent;
        exact.push_back(exponent == 255 ? NAN : ldexp(e2m1(bits), exponent - 127));
      }
  }
};

void test_upload() {
  enum { COPY_BYTES = 1 << 16 };
  Buffer<u32> turn(2);
  const u32 copies = integer(1, 5);
  turn[0] = integer(0, copies - 1), turn[1] = 0;
  std::vector<unsigned char> host(copies * COPY_BYTES), device(1 << 16, 0xee);
  for (int step = 0; step < 3; step++) {
    UploadList list{};
    list.sections = integer(1, 12);
    unsigned to = 0;
    std::vector<unsigned char> bytes(sizeof list);
    for (unsigned i = 0; i < list.sections; i++) {
      const unsigned n = 16 * integer(0, 60);
      list.section[i] = {(unsigned)bytes.size(), to, n, 0};
      for (unsigned j = 0; j < n; j++) bytes.push_back((unsigned char)integer(0, 255));
      to += n + 16 * integer(0, 4);
    }
    memcpy(bytes.data(), &list, sizeof list);
    const u32 before = turn[0];
    std::fill(host.begin(), host.end(), 0);
    memcpy(&host[before * COPY_BYTES], bytes.data(), bytes.size());
    std::fill(device.begin(), device.end(), 0xee);
    LAUNCH(upload, 3, 1024, (UploadArgs{host.data(), device.data(), turn.data(), copies, COPY_BYTES}));
    std::vector<unsigned char> want(1 << 16, 0xee);
    for (unsigned i = 0; i < list.sections; i++) memcpy(&want[list.section[i].to], &bytes[list.section[i].from], list.section[i].bytes);
    check(want == device, "upload");
    check(turn[0] == (before + 1) % copies && turn[1] == 0, "upload's turn");
  }
}

void test_embed(int hidden) {
  Plan plan(5, 3, 100, 40, 128);
  Wide table(40 * hidden, integer(0, 1) ? FORMAT_F32 : FORMAT_BF16);
  Buffer<float> x(plan.rows() * hidden);
  LAUNCH(embed, plan.rows() + 3, 256, (EmbedArgs{plan.step, table.data(), x.data(), table.format, hidden}));
  for (int r = 0; r < plan.rows(); r++)
    for (int i = 0; i < hidden; i++) {
      const int token = plan.tokens[r] < 0 ? plan.last_tokens[-1 - plan.tokens[r]] : plan.tokens[r];
      check(x[r * hidden + i] == (float)table.exact[token * hidden + i], "embed");
    }
  check(x.whole(), "embed's guard");
}

void test_norm(int hidden, bool select, bool combine, bool exact) {
  Plan plan(4, 3, 100, 40, 128);
  const int k = 4, slots = 40, t_rows = plan.rows() + 9, format = format_of_16(), terms = exact ? (format == FORMAT_F16 ? 2 : 3) : 1;
  auto x = filled<float>(plan.rows() * hidden, [] { return real(); });
  auto weight = filled<float>(hidden, [] { return 1 + real(.2f); });
  auto shares = filled<float>(plan.rows() * k, [] { return real(); });
  auto where = filled<int>(plan.rows() * k, [&] { return integer(0, slots - 1); });
  Wide y(slots * hidden, integer(0, 1) ? FORMAT_F32 : FORMAT_F16);
  Buffer<u16> t((i64)terms * slabs(hidden) * t_rows * SLAB);
  Buffer<float> t32(plan.rows() * hidden);
  const auto before = x;
  const i64 term = (i64)slabs(hidden) * t_rows * SLAB;
  NormArgs a{plan.step, x.data(), weight.data(), combine ? y.data() : nullptr, where.data(), shares.data(), t.data(), term,
             select ? nullptr : t32.data(), y.format, k, hidden, t_rows, select, terms, format, exact};
  LAUNCH(rmsnorm, plan.rows() + 2, 384, a);
  const int rows = select ? (int)plan.logits.size() : plan.rows();
  for (int r = 0; r < rows; r++) {
    const int row = select ? plan.logits[r].row : r;
    std::vector<float> v(hidden);
    double squares = 0;
    for (int i = 0; i < hidden; i++) {
      float sum = 0;
      for (int j = 0; j < k; j++) sum = fmaf(shares[row * k + j], (float)y.exact[where[row * k + j] * hidden + i], sum);
      v[i] = before[row * hidden + i] + (combine ? sum : 0);
      if (combine && !select) check(x[row * hidden + i] == v[i], "norm's x");
      squares += (double)(v[i] * v[i]);
    }
    const float scale = 1.f / sqrtf((float)(squares / hidden + (double)1e-5f));
    for (int i = 0; i < slabs(hidden) * SLAB; i++) {
      const double want = i < hidden ? (double)(float)((double)weight[i] * ((double)scale * v[i])) : 0;
      near(from_terms(t, tiled_index(r, i, t_rows), term, terms, format), want, term_error(terms, format), term_floor(terms, format) + 1e-7, "norm's t");
      if (!select && i < hidden) near(t32[r * hidden + i], want, exact ? 1.2e-7 : 1e-6, 0, "norm's t32");
    }
  }
  if (!combine || select) check(!memcmp(x.data(), before.data(), x.size() * 4), "norm leaves x");
  check(x.whole() && t.whole() && t32.whole(), "norm's guards");
  for (int r = rows; r < t_rows; r++) check(t[tiled_index(r, 0, t_rows)] == 0xffff, "norm's rows beyond");
}

void test_route(int hidden, int n, int k, bool exact) {
  Plan plan(5, 2, 100, 40, 128);
  const int rows = plan.rows();
  auto t = filled<float>(rows * hidden, [] { return real(); });
  Wide w(n * hidden, integer(0, 1) ? FORMAT_F32 : FORMAT_BF16);
  auto bias = filled<float>(n, [] { return real(); });
  if (integer(0, 1)) bias[n / 2] = NAN;
  if (integer(0, 2) == 0) std::fill(bias.begin(), bias.begin() + n, NAN);
  if (integer(0, 1)) std::fill(t.begin(), t.begin() + hidden, 0.f), std::fill(bias.begin(), bias.begin() + n, 1.f);      // ties
  Buffer<int> experts(rows * k);
  Buffer<float> shares(rows * k);
  LAUNCH(route, (rows + 3) / 4 + 1, 512, (RouteArgs{plan.step, t.data(), w.data(), bias.data(), experts.data(), shares.data(), w.format, hidden, n, k, exact, 0}));
  for (int r = 0; r < rows; r++) {
    std::vector<float> logits(n);
    for (int e = 0; e < n; e++) {
      double sum = 0;
      for (int i = 0; i < hidden; i++) sum += w.exact[e * hidden + i] * t[r * hidden + i];
      logits[e] = (float)sum + bias[e];
    }
    std::vector<int> order(n);
    for (int e = 0; e < n; e++) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return logits[i] > logits[j] || (std::isnan(logits[j]) && !std::isnan(logits[i])); });
    std::vector<int> picks(order.begin(), order.begin() + k);
    double sum = 0;
    for (int e : picks) sum += expf(logits[e] - logits[picks[0]]);
    std::sort(picks.begin(), picks.end());
    for (int i = 0; i < k; i++) {
      check(experts[r * k + i] == picks[i], "route's experts", r);
      near(shares[r * k + i], expf(logits[picks[i]] - logits[order[0]]) / sum, exact ? 3e-7 : 1e-4, 1e-9, "route's shares");
    }
  }
  check(experts.whole() && shares.whole(), "route's guards");
}

struct Routed {
  Buffer<int> experts, offsets, counts, slots;
  std::vector<int> want_offsets, want_slots;
  Routed(int rows, int n, int k) : experts(rows * k), offsets(n + 1), counts(n), slots(rows * k), want_offsets(n + 1), want_slots(rows * k) {
    std::vector<int> all(n), count(n);
    for (int e = 0; e < n; e++) all[e] = e;
    for (int r = 0; r < rows; r++) {
      std::shuffle(all.begin(), all.end(), engine);
      std::sort(all.begin(), all.begin() + k);
      for (int i = 0; i < k; i++) experts[r * k + i] = integer(0, 2) ? all[i] : i;
      std::sort(&experts[r * k], &experts[r * k] + k);
      for (int i = 1; i < k; i++) if (experts[r * k + i] <= experts[r * k + i - 1]) for (int j = 0; j < k; j++) experts[r * k + j] = all[j];
      for (int i = 0; i < k; i++) count[experts[r * k + i]]++;
    }
    for (int e = 0; e < n; e++) want_offsets[e + 1] = want_offsets[e] + round_up(count[e], (int)GROUP_ALIGN);
    std::vector<int> next = want_offsets;
    for (int i = 0; i < rows * k; i++) want_slots[i] = next[experts[i]]++;
    want_counts = count;
  }
  std::vector<int> want_counts;
};

void check_sorted(const Routed& r, int rows) {
  check(std::equal(r.want_offsets.begin(), r.want_offsets.end(), r.offsets.begin()), "sort's offsets", rows);
  check(std::equal(r.want_counts.begin(), r.want_counts.end(), r.counts.begin()), "sort's counts", rows);
  check(std::equal(r.want_slots.begin(), r.want_slots.end(), r.slots.begin()), "sort's slots", rows);
  check(r.offsets.whole() && r.counts.whole() && r.slots.whole(), "sort's guards");
}

// Each expert once, those with the largest tiles first, in the fewest tiles; of at most half, the last ones, in one more.
// How many of them, tests/gpu/cuts.rs checks.
void check_cuts(const Buffer<ExpertCut>& cuts, const std::vector<int>& counts, int tile) {
  const int n = (int)counts.size();
  const auto steps = [&](int e) { return (counts[e] + 15) / 16; };
  const auto fewest = [&](int e) { return (steps(e) + tile - 1) / tile; };
  std::vector<int> order(n);
  for (int e = 0; e < n; e++) order[e] = e;
  const auto key = [&](int e) { return steps(e) ? steps(e) * 256 / fewest(e) : 0; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
  const int live = n - (int)std::count(counts.begin(), counts.end(), 0);
  int wrong = 0;
  bool more = false;
  for (int i = 0; i < n; i++) {
    const int e = order[i];
    more = more || cuts[i].tiles > fewest(e);
    wrong += cuts[i].expert != e || cuts[i].tiles != (more && i < live ? std::min(steps(e), fewest(e) + 1) : fewest(e));
    wrong += more && i < live - live / 2;
  }
  check(!wrong && cuts.whole(), "sort's cuts", n);
}

void test_sort(int rows, int n, int k) {
  StepHeader header{};
  header.rows = rows;
  Step step{};
  step.header = &header;
  Routed r(rows, n, k);
  Buffer<int> slot_rows(rows * k + n * (GROUP_ALIGN - 1)), want = slot_rows;
  enum { MLP1_SPANS = 45, MLP2_SPANS = 23, PLACES = 608 };
  const int tile = integer(0, 1) ? 8 : 4;
  Buffer<ExpertCut> mlp1_cuts(n), mlp2_cuts(n);
  const SortArgs args{step, r.experts.data(), r.offsets.data(), r.counts.data(), r.slots.data(), n, k, slot_rows.data(),
                      mlp1_cuts.data(), mlp2_cuts.data(), MLP1_SPANS, MLP2_SPANS, tile, PLACES};
  LAUNCH(sort, (rows + 511) / 512 + 1, 1024, args);
  check_sorted(r, rows);
  for (int i = 0; i < rows * k; i++) want[r.want_slots[i]] = i / k;
  check(want == slot_rows, "sort's rows of slots", rows);
  check_cuts(mlp1_cuts, r.want_counts, tile);
  check_cuts(mlp2_cuts, r.want_counts, tile);
}

void test_gather(int rows, int k_blocks, int terms, bool sorts = false, int n = 32, int k = 4) {
  StepHeader header{};
  header.rows = rows;
  Step step{};
  step.header = &header;
  const int in_rows = rows + 5, out_rows = rows * k + 8 * n + 44;
  Routed r(rows, n, k);
  auto in = filled<u16>((size_t)terms * k_blocks * in_rows * SLAB, [] { return (u16)integer(0, 65535); });
  Buffer<u16> out((size_t)terms * k_blocks * out_rows * SLAB), want = out;
  const i64 in_term = (i64)k_blocks * in_rows * SLAB, out_term = (i64)k_blocks * out_rows * SLAB;
  const int grid = (rows + 31) / 32 * k_blocks + k_blocks;
  const GatherArgs gather_args{step, in.data(), out.data(), sorts ? nullptr : r.want_slots.data(), in_term, out_term, k, k_blocks, in_rows, out_rows, terms, 0};
  if (sorts) {
    const SortArgs sort_args{step, r.experts.data(), r.offsets.data(), r.counts.data(), r.slots.data(), n, k};
    LAUNCH(sort_gather, grid, 256, (SortGatherArgs{sort_args, gather_args}));
    check_sorted(r, rows);
  } else {
    LAUNCH(gather, grid, 256, gather_args);
  }
  for (int t = 0; t < terms; t++)
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < k; i++)
        for (int c = 0; c < k_blocks * SLAB; c++)
          want[t * out_term + tiled_index(r.want_slots[row * k + i], c, out_rows)] = in[t * in_term + tiled_index(row, c, in_rows)];
  check(want == out, "gather");
}

// norm_route gives the same bits as rmsnorm, route, sort and gather one after the other.
void test_norm_route(int hidden, int n, int k, bool exact, bool alone) {
  Plan plan(alone ? 1 : 5, alone ? 1 : 2, 100, 40, 128);
  const int rows = plan.rows(), t_rows = rows + 9, out_rows = k * GROUP_ALIGN + 3;
  const int format = format_of_16(), terms = exact ? (format == FORMAT_F16 ? 2 : 3) : 1;
  auto x = filled<float>(rows * hidden, [] { return real(); });
  auto weight = filled<float>(hidden, [] { return 1 + real(.2f); });
  auto bias = filled<float>(n, [] { return real(); });
  Wide router(n * hidden, integer(0, 1) ? FORMAT_F32 : FORMAT_BF16);
  const i64 term = (i64)slabs(hidden) * t_rows * SLAB, out_term = (i64)slabs(hidden) * out_rows * SLAB;
  struct Result {
    Buffer<u16> t, out;
    Buffer<float> t32, shares;
    Buffer<int> experts, offsets, counts, slots;
  };
  const Result empty = {Buffer<u16>(terms * term), Buffer<u16>(terms * out_term), Buffer<float>(rows * hidden), Buffer<float>(rows * k),
                        Buffer<int>(rows * k), Buffer<int>(n + 1), Buffer<int>(n), Buffer<int>(rows * k)};
  const auto args = [&](Result& r) {
    return NormRouteArgs{
        {plan.step, x.data(), weight.data(), nullptr, nullptr, nullptr, r.t.data(), term, r.t32.data(), 0, k, hidden, t_rows, 0, terms, format, exact},
        {plan.step, r.t32.data(), router.data(), bias.data(), r.experts.data(), r.shares.data(), router.format, hidden, n, k, exact, 0},
        {plan.step, r.experts.data(), r.offsets.data(), r.counts.data(), r.slots.data(), n, k},
        {plan.step, r.t.data(), r.out.data(), nullptr, term, out_term, k, slabs(hidden), t_rows, out_rows, terms, 0}, alone, 0};
  };
  Result one_by_one = empty, at_once = empty;
  const NormRouteArgs a = args(one_by_one);
  LAUNCH(rmsnorm, rows, 384, a.norm);
  LAUNCH(route, (rows + 3) / 4, 512, a.route);
  if (alone) LAUNCH(sort_gather, slabs(hidden), 256, (SortGatherArgs{a.sort, a.gather}));
  LAUNCH(norm_route, rows + 2, 384, args(at_once));
  const auto same = [](const auto& a, const auto& b) { return !memcmp(a.data(), b.data(), a.size() * sizeof a[0]); };
  check(same(at_once.t, one_by_one.t), "norm_route's t", rows);
  check(same(at_once.experts, one_by_one.experts) && same(at_once.shares, one_by_one.shares), "norm_route's routes", rows);
  check(same(at_once.t32, empty.t32), "norm_route leaves t32", rows);
  check(same(at_once.offsets, one_by_one.offsets) && same(at_once.counts, one_by_one.counts) && same(at_once.slots, one_by_one.slots),
        "norm_route's slots", rows);
  check(same(at_once.out, one_by_one.out), "norm_route's gathered row", rows);
}

// Each code with each scale whose values float32 has, and the scale that is NaN: inputs of a single 1 give the weights.
void test_codes() {
  const int cols = 64, rows = 16, n = 256, in_rows = 17;
  const auto scale = [](int r, int) { return r > 252 ? 255 : r; };
  const Codes w(n, cols, [](int r, int c) { return (r + c) % 16; }, scale);
  const i64 term = (i64)in_rows * SLAB;
  Buffer<u16> in(2 * term);
  std::fill(in.begin(), in.end(), 0);
  for (int r = 0; r < rows; r++) store_terms<FORMAT_F16>(&in[tiled_index(r, r * 3, in_rows)], term, 2, 1);
  Buffer<float> y(rows * n);
  GemmArgs a{};
  a.weights = w.bytes.data(), a.input = in.data(), a.in_term = term, a.rows = &rows, a.y = y.data(), a.groups = 1, a.n = n;
  a.k_blocks = 1, a.in_rows = in_rows, a.scale = 1, a.format = FORMAT_F16, a.cols = cols, a.weight_format = FORMAT_MXFP4, a.terms = 2;
  LAUNCH(plain_mlp2, n / WIRE_ROWS, 512, a);
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < n; o++) {
      const double want = w.exact[(size_t)o * cols + r * 3];
      check(std::isnan(want) ? std::isnan(y[r * n + o]) : y[r * n + o] == want, "plain_mlp2's weights", o);
    }
  check(y.whole(), "plain_mlp2's guard");
}

int kv_elements(int head_dim, int kv_heads) { return kv_heads * 2 * KV_PAGE * head_dim; }

void test_rope(int head_dim, int heads, int kv_heads, int format, bool windowed, bool paired) {
  Plan plan(6, 4, 300, 40, 128);
  const int rows = plan.rows(), width = head_dim * (heads + 2 * kv_heads), half = head_dim / 2, bytes = format == FORMAT_F32 ? 4 : 2;
  auto qkv = filled<float>(rows * width, [] { return real(); });
  if (format == FORMAT_F16) qkv[rows * width - 1] = 1e6f;
  auto cos = filled<float>(300 * half, [] { return real(); }), sin = filled<float>(300 * half, [] { return real(); });
  Buffer<unsigned char> q(rows * heads * head_dim * bytes);
  const i64 head_bytes = 2 * KV_PAGE * head_dim * bytes + 768, page_bytes = head_bytes * kv_heads;
  Buffer<unsigned char> kv(plan.pages * page_bytes), want_kv = kv, want_q = q;
  RopeStoreArgs a{plan.step, qkv.data(), cos.data(), sin.data(), q.data(), kv.data(), page_bytes, (int)head_bytes, format, head_dim, heads, kv_heads, windowed, paired};
  LAUNCH(rope_store, rows + 2, 320, a);
  auto put = [&](unsigned char* at, i64 element, float v) {
    if (format == FORMAT_F32) memcpy(at + element * 4, &v, 4);
    else { const u16 h = format == FORMAT_F16 ? to_f16(v) : to_bf16(v); memcpy(at + element * 2, &h, 2); }
  };
  const float scale = format == FORMAT_F32 ? 1 : 1.44269504f / sqrtf((float)head_dim);
  for (int r = 0; r < rows; r++) {
    const int p = plan.positions[r];
    unsigned char* page = want_kv.data() + plan.page(r, p, windowed) * page_bytes;
    for (int h = 0; h < heads + 2 * kv_heads; h++)
      for (int i = 0; i < head_dim; i++) {
        const auto in = [&](int e) { return qkv[r * width + h * head_dim + (!paired ? e : e < half ? 2 * e : 2 * (e - half) + 1)]; };
        const float c = cos[p * half + i % half], s = sin[p * half + i % half];
        float v = in(i);
        if (h < heads + kv_heads) {
          if (i < half) v = fmaf(in(i), c, -mul_rn(in(i + half), s));
          else v = fmaf(in(i), c, mul_rn(in(i - half), s));
        }
        if (h < heads) put(want_q.data(), ((i64)r * heads + h) * head_dim + i, v * scale);
        else if (h < heads + kv_heads) put(page + (h - heads) * head_bytes, kv_index(p, i, head_dim), v);
        else put(page + (h - heads - kv_heads) * head_bytes, KV_PAGE * head_dim + kv_index(p, i, head_dim), v);
      }
  }
  check(q == want_q, "rope_store's q");
  check(kv == want_kv, "rope_store's cache");
}

// `padded`: behind a row's candidates, larger logits that may not be found.
void test_argmax(int candidates, bool logits_rows, int padded = 0) {
  Plan plan(12, 1, 100, 40, 128);
  const int rows = (int)plan.logits.size(), best_rows = rows + 3;
  Buffer<float> best(std::max(1, logits_rows ? rows * (candidates + padded) : candidates * best_rows));
  Buffer<int> index(best.count());
  Buffer<Greedy> host(3 * best_rows);
  std::fill(best.begin(), best.end(), 1e9f);
  std::vector<int> base(candidates);
  for (int c = 0; c < candidates; c++) base[c] = logits_rows ? c : (c * 7919 + 13) % 100003 + (c ? 0 : 200000);
  std::vector<std::vector<float>> v(rows, std::vector<float>(candidates));
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < candidates; c++) {
      const int kind = r % 4;
      v[r][c] = kind == 0 ? real() : kind == 1 ? (float)integer(0, 3) : kind == 2 ? NAN : integer(0, 1) ? NAN : -INFINITY;
      const int at = logits_rows ? r * (candidates + padded) + c : c * best_rows + r;
      best[at] = v[r][c], index[at] = base[c];
    }
  const auto tokens = plan.last_tokens;
  ArgmaxArgs a{plan.step, best.data(), logits_rows ? nullptr : index.data(), host.data(), candidates + padded, best_rows,
               candidates, 0};
  if (logits_rows) LAUNCH(argmax_logits, rows + 1, 1024, a);
  else LAUNCH(argmax, rows / 8 + 2, 1024, a);
  for (int r = 0; r < rows; r++) {
    float most = -INFINITY;
    int token = INT_MAX;
    for (int c = 0; c < candidates; c++)
      if (v[r][c] > most || (v[r][c] == most && base[c] < token)) most = v[r][c], token = base[c];
    if (token == INT_MAX) token = 0;
    const Greedy got = host[plan.header.turn * best_rows + r];
    check((int)got.token == token && got.logit == most, "argmax", r);
    if (plan.logits[r].slot >= 0) check(plan.last_tokens[plan.logits[r].slot] == token, "argmax's last token");
  }
  check(host.whole(), "argmax's guards");
}

// The sampler's draw, written plainly: a stable sort of pairs; without a nucleus, from all tokens. -1 where a nucleus
// would need tokens below `least`, or where more than `most` tokens are at or above it. A `coin` of -1 becomes one that
// is as near as can be to where one of the nucleus's tokens ends and the next begins.
int drawn_from(const std::vector<float>& e, double sum, float topp, float least, int most, float& coin) {
  const int n = (int)e.size();
  std::vector<std::pair<float, int>> pairs(n);
  for (int i = 0; i < n; i++) pairs[i] = {(float)(e[i] / sum), i};
  float mass = 1;
  if (topp > 0) {
    mass = 0;
    const auto probable = std::count_if(pairs.begin(), pairs.end(), [&](auto& p) { return p.first >= least; });
    if (probable > most) return -1;
    const auto rest = std::remove_if(pairs.begin(), pairs.end(), [&](auto& p) { return p.first < least; });
    pairs.erase(rest, pairs.end());
    std::stable_sort(pairs.begin(), pairs.end(), [](auto& p, auto& q) { return p.first > q.first; });
    size_t kept = 0;
    while (kept < pairs.size() && mass <= topp) mass += pairs[kept++].first;
    if (!(mass > topp)) return -1;
    pairs.resize(kept);
  }
  float cdf = 0;
  if (coin < 0) {
    const int ending = integer(0, (int)pairs.size() - 1);
    for (int i = 0; i <= ending; i++) cdf += pairs[i].first;
    coin = std::min((float)floor((double)cdf / mass * 0x1p24), 0x1p24f - 1) * 0x1p-24f;
    cdf = 0;
  }
  const float target = topp > 0 ? coin * mass : coin;
  for (auto& p : pairs) if (target < (cdf += p.first)) return p.second;
  return pairs.back().second;
}

// Rows of several kinds and temperatures, which take different paths through the ordered sum and through wide nuclei:
// each gives the bits of the C library's own loop. Greedy rows among them are left alone. Behind a row are `padded`
// logits that may not be sampled, all NaN. Returns how many rows draw_wide has sampled.
int test_draw(int vocab, float topp, int padded) {
  enum { KINDS = 16 };
  Plan plan(2 * KINDS, 1, 100, 40, 128);
  const int rows = (int)plan.logits.size();
  const float improbable = (1 - topp) / (vocab - 1);
  const float least = std::max(improbable, integer(0, 1) ? 1.f / DRAW_TOKENS : 1.f / 16384);
  Buffer<float> logits(rows * (vocab + padded));
  u64 powers[32];
  for (int i = 0; i < 32; i++) {
    const double power = exp2(i / 32.0);
    memcpy(&powers[i], &power, 8);
    powers[i] -= (u64)i << 47;
  }
  std::vector<int> largest(rows);
  std::vector<double> exact(rows);
  std::vector<std::vector<float>> exponentials(rows, std::vector<float>(vocab));
  for (int r = 0; r < rows; r++) {
    float* row = logits.data() + r * (vocab + padded);
    const float temperature = integer(0, 1) ? 1.f : 0.3f;
    plan.logits[r].temperature = integer(0, 7) ? temperature : 0;
    plan.logits[r].topp = topp, plan.logits[r].least = least;
    for (int i = 0; i < vocab; i++) {
      const double along = (double)i / vocab;
      const float kinds[KINDS] = {real(2.5f), real(0.2f), 3.f, (float)(-120 * along), (float)(100 * along - 100),
                                  i < vocab / 2 ? -INFINITY : real(9), i % 7 ? real(12) - 60 : real(3), real(40),
                                  i == vocab - 1 ? 0 : (i % 2 ? -103.28f : -66.5f + i % 5) * temperature, real(6),
                                  (float)integer(-3, 3), i % 37 ? -30 : (float)(i % 3), real(temperature),
                                  roundf(real(64 * temperature)) / 64, (i % 97 ? real() : 6 + real()) * temperature,
                                  (i % 5 ? 0 : -0.5f) * temperature};
      row[i] = kinds[r % KINDS];
    }
    if (r % KINDS == 0) row[integer(0, vocab - 1)] = 30;
    if (r % KINDS == 9) row[integer(0, vocab - 1)] = integer(0, 1) ? NAN : INFINITY;
    int& most = largest[r];
    for (int i = 0; i < vocab; i++) if (row[i] > row[most] || std::isnan(row[most])) most = i;
    if (plan.logits[r].slot >= 0) plan.last_tokens[plan.logits[r].slot] = most;
    const float max = row[most] / temperature;
    auto& e = exponentials[r];
    for (int i = 0; i < vocab; i++) e[i] = expf(row[i] / temperature - max), exact[r] += e[i];
    float& coin = plan.logits[r].coin = integer(0, 1) ? -1 : integer(0, (1 << 24) - 1) * 0x1p-24f;
    if (r % KINDS != 9) drawn_from(e, exact[r], topp, improbable, vocab, coin);
    if (coin < 0 || !integer(0, 5)) coin = (float)integer(0, 1);
  }
  const int host_rows = rows + integer(0, 3);
  Buffer<int> host(3 * host_rows);
  Buffer<double> sums(rows);
  const DrawArgs args{plan.step, logits.data(), host.data(), host_rows, powers, sums.data(), vocab + padded,
                      vocab};
  LAUNCH(draw, rows + 1, 256, args);
  int decided = 0, left = 0, wide = 0;
  const auto found = [&](int r) { return host[plan.header.turn * host_rows + r]; };
  const auto check_row = [&](int r, int want) {
    check(found(r) == want, "draw's token", r % KINDS);
    const int last = plan.last_tokens[plan.logits[r].slot];
    check(last == (want < 0 ? largest[r] : want), "draw's last token", r % KINDS);
  };
  for (int r = 0; r < rows; r++) {
    const int slot = plan.logits[r].slot;
    if (slot < 0 || plan.logits[r].temperature == 0 || r % KINDS == 9) {
      check(found(r) == -1 && std::isnan(sums[r]), "draw's row that is not to be", r);
      if (slot >= 0) check(plan.last_tokens[slot] == largest[r], "draw's row that is left to the host");
      continue;
    }
    const bool looks = topp == 0 || exact[r] <= 32 || vocab <= DRAW_TOKENS;
    const auto& e = exponentials[r];
    const int want = looks ? drawn_from(e, exact[r], topp, least, DRAW_TOKENS, plan.logits[r].coin) : -1;
    check(sums[r] == (want < 0 ? exact[r] : -exact[r]), "draw's sum", r % KINDS);
    check_row(r, want);
    (want < 0 ? left : decided)++;
  }
  check(topp > 0.5f || decided > 0, "draw's rows that are decided", topp);
  if (topp > 0.999 && vocab > DRAW_TOKENS) check(left > 0, "draw's rows that are left to the host", topp);

  const std::vector<int> before(host.begin(), host.end());
  LAUNCH_WIDE(rows + 1, args);
  for (int r = 0; r < rows; r++) {
    const int slot = plan.logits[r].slot, was = before[plan.header.turn * host_rows + r];
    if (slot < 0 || was >= 0 || r % KINDS == 9 || found(r) < 0) {
      check(found(r) == was, "draw_wide's row that is not to be", r % KINDS);
      if (slot >= 0) check(plan.last_tokens[slot] == (was < 0 ? largest[r] : was), "draw_wide's other last token");
      continue;
    }
    check_row(r, drawn_from(exponentials[r], exact[r], topp, improbable, vocab, plan.logits[r].coin));
    wide++;
  }
  check(host.whole() && sums.whole(), "draw's guards");
  return wide;
}

// Rows of several kinds, in some of which probable tokens crowd in few threads' places, so that more are collected than
// there is room for: the most probable tokens to the bit, the sum to float32's exponentials. Greedy rows, sampled ones,
// prompt's and such as are not scored are mixed. Returns how many rows are not left to the host.
int test_score(int vocab) {
  enum { KINDS = 12 };
  Plan plan(2 * KINDS, 1, 100, vocab, 128);
  const int rows = (int)plan.logits.size(), host_rows = rows + integer(0, 3);
  Buffer<float> logits(rows * vocab);
  for (int r = 0; r < rows; r++) {
    auto& wanted = plan.logits[r];
    wanted.next = wanted.slot < 0 || integer(0, 1) ? integer(0, vocab - 1) : -1;
    wanted.top = integer(0, 7) ? integer(0, 2) ? integer(0, MOST_TOP) : MOST_TOP : -1;
    for (int i = 0; i < vocab; i++) {
      const bool in_few_places = i / 8 % 256 < 20, in_one = i / 8 % 256 == 77;
      const float kinds[KINDS] = {real(2.5f), real(30), 3.f, (float)i, (float)-i, i % 2 ? 0.f : -0.f,
                                  in_few_places ? (float)i / 64 : -100 + real(), in_one ? 5.f : -INFINITY,
                                  i == vocab / 2 ? 1.f : -INFINITY, real(), (float)integer(-3, 3), real() * 1e30f};
      logits[r * vocab + i] = kinds[r % KINDS];
    }
    if (r % KINDS == 9) logits[r * vocab + integer(0, vocab - 1)] = integer(0, 1) ? NAN : integer(0, 1) ? INFINITY : -INFINITY;
  }
  Buffer<Scored> host(3 * host_rows);
  LAUNCH(score, rows + 1, 256, (ScoreArgs{plan.step, logits.data(), host.data(), host_rows, vocab, 0}));
  int computed = 0;
  for (int r = 0; r < rows; r++) {
    const float* row = logits.data() + r * vocab;
    const auto& wanted = plan.logits[r];
    const Scored& got = host[plan.header.turn * host_rows + r];
    if (wanted.top < 0) {
      u32 untouched;
      memcpy(&untouched, &got.token, 4);
      check(untouched == ~0u, "score's row that is not scored", r % KINDS);
      continue;
    }
    const int token = wanted.next >= 0 ? wanted.next : plan.last_tokens[wanted.slot];
    const bool same = got.logit == row[token] || std::isnan(row[token]);
    check(got.token == token && same, "score's token", r % KINDS);
    const float largest = *std::max_element(row, row + vocab);
    double sum = 0;
    for (int i = 0; i < vocab; i++) sum += exp((double)row[i] - largest);
    if (std::isnan(sum)) {
      check(std::isnan(got.sum), "score's row that is left to the host", r % KINDS);
      continue;
    }
    computed++;
    const double wrong = log(got.sum / sum);
    check(got.largest == largest && fabs(wrong) < 3e-6, "score's sum", r % KINDS + wrong);
    std::vector<int> order(vocab);
    for (int i = 0; i < vocab; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    for (int i = 0; i < wanted.top && i < vocab; i++)
      check(got.top_tokens[i] == order[i] && got.top_logits[i] == row[order[i]], "score's most probable tokens", r % KINDS);
  }
  check(host.whole(), "score's guard");
  return computed;
}

void test_range(int format, int rows, int cols, int members) {
  const i64 tiles = (i64)members * wire_rows(rows) / WIRE_ROWS, values = tiles * WIRE_ROWS * cols;
  const WireCodes codes{cols};
  Buffer<unsigned char> wire(format == FORMAT_BF16 ? values * 2 : tiles * codes.tile_bytes());
  std::fill_n(wire.begin(), wire.count(), 0);
  int smallest = INT_MAX, largest = INT_MIN;
  std::vector<int> rows_largest;
  for (i64 row = 0; row < tiles * WIRE_ROWS; row++) {
    if (row % wire_rows(rows) >= rows) continue;
    int row_largest = INT_MIN;
    for (int k = 0; k < cols; k++) {
      int exponent;
      if (format == FORMAT_BF16) {
        const u16 value = to_bf16(real(.02f));
        memcpy(&wire[(row * cols + k) * 2], &value, 2);
        if (bf16_to_f32(value) == 0) continue;
        exponent = ilogb(bf16_to_f32(value));
      } else {
        unsigned char* tile = &wire[row / WIRE_ROWS * codes.tile_bytes()];
        const int in_tile = row % WIRE_ROWS;
        if (k % 2 == 0) tile[codes.code(in_tile, k)] = (unsigned char)integer(0, 255);
        if (k % MXFP4_BLOCK) continue;
        exponent = integer(-9, -5);
        tile[codes.scale(in_tile, k)] = (unsigned char)(exponent + 127);
      }
      smallest = std::min(smallest, exponent), largest = std::max(largest, exponent);
      row_largest = std::max(row_largest, exponent);
    }
    if (format == FORMAT_BF16) rows_largest.push_back(row_largest);
  }
  int weakest_row = INT_MAX;
  for (int row : rows_largest) weakest_row = std::min(weakest_row, row);
  int result[3] = {INT_MAX, INT_MIN, INT_MAX};
  LAUNCH(range, 3, 256, (RangeArgs{wire.data(), result, tiles, rows, cols, format, 0}));
  check(result[0] == smallest && result[1] == largest, "range", result[0] - smallest);
  check(result[2] == weakest_row, "range's weakest row", result[2] - weakest_row);
}

// The gated unit of every pair of odd numbers: NaN exactly where the float32 baseline has it.
void test_odd_gates(int format, int terms) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 7.5f, -7.5f, 0.5f}, limit = 7;
  constexpr int COUNT = sizeof odd / sizeof *odd, N = 2 * COUNT * COUNT, ROWS = 2;
  Buffer<u16> in(terms * ROWS * SLAB), tiled(terms * ROWS * COUNT * COUNT);
  std::fill(in.begin(), in.end(), 0);
  std::vector<float> weights((size_t)N * SLAB, 1.f), bias(N);
  for (int i = 0; i < N; i++) bias[i] = odd[i % 2 ? i / 2 % COUNT : i / 2 / COUNT];
  const int count = ROWS;
  GemmArgs a{};
  a.weights = (const unsigned char*)weights.data(), a.bias = bias.data(), a.input = in.data(), a.in_term = ROWS * SLAB;
  a.rows = &count, a.tiled = tiled.data(), a.tiled_term = ROWS * COUNT * COUNT, a.groups = 1, a.n = N, a.k_blocks = 1;
  a.in_rows = a.tiled_rows = ROWS, a.scale = 1, a.limit = limit, a.format = format, a.cols = SLAB;
  a.weight_format = FORMAT_F32, a.terms = (short)terms;
  LAUNCH(plain_mlp1, N / WIRE_ROWS, 512, a);
  for (int i = 0; i < ROWS * N / 2; i++) {
    const int row = i % ROWS, pair = i / ROWS;
    float gate = bias[2 * pair], up = bias[2 * pair + 1];
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    const float want = gate * (1 / (1 + expf(-1.702f * gate))) * (up + 1);
    const double got = from_terms(tiled, tiled_index(row, pair, ROWS), a.tiled_term, terms, format);
    check(std::isnan(want) ? std::isnan(got) : std::fabs(got - want) <= 5e-3 * std::fabs(want) + 6.2e-5, "odd gates", pair);
  }
  check(tiled.whole(), "odd gates' guard");
}

// One product with several groups, with every epilogue.
void test_gemm(int n, int cols, int groups, int weight_format, bool exact) {
  const int format = format_of_16(), terms = exact ? (format == FORMAT_F16 ? 2 : 3) : 1, k_blocks = slabs(cols);
  std::vector<int> counts, offsets;
  int total = 0;
  for (int g = 0; g < groups; g++) {
    offsets.push_back(total);
    counts.push_back(g % 3 == 1 ? 0 : integer(1, 11));
    total = round_up(total + counts[g], 8);
  }
  const int in_rows = total + 8, tiled_rows = total + 3, width = n / 2, padded_rows = round_up(n, 32);
  const i64 in_term = (i64)k_blocks * in_rows * SLAB, tiled_term = (i64)slabs(width) * tiled_rows * SLAB;
  Buffer<u16> in(terms * in_term);
  std::vector<double> x((size_t)total * cols);
  std::fill(in.begin(), in.end(), 0);
  for (int r = 0; r < total; r++)
    for (int c = 0; c < cols; c++) {
      u16* at = &in[tiled_index(r, c, in_rows)];
      store_terms(format, at, in_term, terms, real());
      x[(size_t)r * cols + c] = from_terms(in, tiled_index(r, c, in_rows), in_term, terms, format);
    }
  const bool codes = weight_format == FORMAT_MXFP4;
  const Wide wide(codes ? 0 : (size_t)groups * padded_rows * cols, weight_format, 1 / sqrtf((float)cols));
  std::vector<int> scales(codes ? (size_t)groups * padded_rows * cols / MXFP4_BLOCK : 0);
  for (int& scale : scales) scale = 125 - (int)log2(sqrt(cols)) - integer(0, 3);
  const auto scale_at = [&](int r, int c) { return scales[((size_t)r * cols + c) / MXFP4_BLOCK]; };
  const Codes packed(codes ? groups * padded_rows : 0, cols, [](int, int) { return integer(0, 15); }, scale_at);
  const std::vector<double>& exact_weights = codes ? packed.exact : wide.exact;
  auto bias = filled<float>((size_t)groups * n, [] { return real(); });
  Buffer<float> out((size_t)total * n), added = filled<float>((size_t)total * n, [] { return real(); });
  const auto before = added;
  Buffer<u16> tiled(terms * tiled_term);
  Buffer<unsigned char> y((size_t)total * n * 4);
  GemmArgs a{};
  a.weights = codes ? packed.bytes.data() : (const unsigned char*)wide.data(), a.bias = bias.data(), a.input = in.data(), a.in_term = in_term;
  a.rows = counts.data(), a.offsets = groups > 1 ? offsets.data() : nullptr, a.out = out.data(), a.tiled = tiled.data(), a.tiled_term = tiled_term;
  a.y = y.data(), a.groups = groups, a.n = n, a.k_blocks = k_blocks, a.in_rows = in_rows, a.tiled_rows = tiled_rows;
  a.scale = 1, a.limit = 1.5f, a.format = format, a.cols = cols, a.weight_format = (short)weight_format, a.terms = (short)terms;
  const int grid = padded_rows / 32 * groups * integer(1, 3);
  if (!codes) LAUNCH(plain_qkv, grid, 512, a);
  LAUNCH(plain_mlp1, grid, 512, a);
  LAUNCH(plain_mlp2, grid, 512, a);
  a.out = added.data();
  if (!codes) LAUNCH(plain_attn_out, grid, 512, a);
  const double tight = exact ? 4e-7 : 3e-6, loose = tight + (exact ? term_error(terms, format) : term_error(1, format));
  for (int g = 0; g < groups; g++)
    for (int r = offsets[g]; r < offsets[g] + counts[g]; r++) {
      std::vector<double> v(n);
      for (int o = 0; o < n; o++) {
        for (int c = 0; c < cols; c++) v[o] += x[(size_t)r * cols + c] * exact_weights[((size_t)g * padded_rows + o) * cols + c];
        v[o] += bias[g * n + o];
        const size_t at = (size_t)r * n + o;
        if (!codes) near(out[at], v[o], tight, tight, "plain_qkv");
        if (!codes) near(added[at], before[at] + v[o], tight, tight, "plain_attn_out");
        if (terms > 1) near(((float*)y.data())[at], v[o], tight, tight, "plain_mlp2");
        else near(f16_to_f32(((u16*)y.data())[at]), v[o], 6e-4, 1e-5, "plain_mlp2");
      }
      for (int i = 0; i < slabs(width) * SLAB; i++) {
        double want = 0;
        if (i < width) {
          const double gate = std::min(v[2 * i], 1.5), up = std::max(-1.5, std::min(v[2 * i + 1], 1.5));
          want = gate / (1 + exp(-1.702 * gate)) * (up + 1);
        }
        near(from_terms(tiled, tiled_index(r, i, tiled_rows), tiled_term, terms, format), want, loose, loose, "plain_mlp1");
      }
    }
  for (int r = 0, g = 0; r < total; r++) {
    while (g + 1 < groups && offsets[g + 1] <= r) g++;
    if (r >= offsets[g] + counts[g]) check(std::isnan(out[(size_t)r * n]) && tiled[tiled_index(r, 0, tiled_rows)] == 0xffff && y[(size_t)r * n * (terms > 1 ? 4 : 2)] == 0xff, "plain's rows beyond");
  }
  check(out.whole() && added.whole() && tiled.whole() && y.whole(), "plain's guards");
}

void attend(int kv_format, int grid, const AttentionArgs& a) {
  if (kv_format == FORMAT_F32) LAUNCH(attention_plain_f32, grid, 256, a);
  else if (kv_format == FORMAT_F16) LAUNCH(attention_plain_f16, grid, 256, a);
  else LAUNCH(attention_plain_bf16, grid, 256, a);
}

void test_attention(int head_dim, int heads, int kv_heads, int kv_format, bool windowed, int longest) {
  Plan plan(4, 3, longest, 40, 100);
  const int rows = plan.rows(), bytes = kv_format == FORMAT_F32 ? 4 : 2, group = heads / kv_heads, format = format_of_16();
  const int terms = kv_format == FORMAT_F32 ? (format == FORMAT_F16 ? 2 : 3) : 1, out_rows = rows + 5;
  const i64 head_bytes = 2 * KV_PAGE * head_dim * bytes + 768, page_bytes = head_bytes * kv_heads;
  Buffer<unsigned char> kv(plan.pages * page_bytes);                          // NaN where nothing was stored
  Wide q((size_t)rows * heads * head_dim, kv_format, kv_format == FORMAT_F32 ? 1 : .2f);
  auto sinks = filled<float>(heads, [] { return real(); });
  for (int h = 0; h < heads; h += windowed ? 1 : 2) sinks[h] = -INFINITY;       // no sink
  auto first_key = [&](int p) { return windowed ? std::max(0, p - plan.window + 1) : 0; };
  auto at = [&](int row, int p, int kv_head) { return kv.data() + plan.page(row, p, windowed) * page_bytes + kv_head * head_bytes; };
  auto get = [&](const unsigned char* page, int element) {
    if (kv_format == FORMAT_F32) { float v; memcpy(&v, page + element * 4, 4); return v; }
    u16 v; memcpy(&v, page + element * 2, 2);
    return kv_format == FORMAT_F16 ? f16_to_f32(v) : bf16_to_f32(v);
  };
  for (const ChunkInfo& c : plan.chunks)
    for (int p = first_key(c.first_position); p < c.first_position + c.rows; p++)
      for (int h = 0; h < kv_heads; h++)
        for (int e = 0; e < 2 * head_dim; e++) {
          unsigned char* page = at(c.first_row, p, h);
          const int element = e / head_dim * KV_PAGE * head_dim + kv_index(p, e % head_dim, head_dim);
          const float v = real();
          const u16 narrow = kv_format == FORMAT_F16 ? to_f16(v) : to_bf16(v);
          if (kv_format == FORMAT_F32) memcpy(page + element * 4, &v, 4);
          else memcpy(page + element * 2, &narrow, 2);
        }
  const int width = heads * head_dim;
  const i64 term = (i64)slabs(width) * out_rows * SLAB;
  Buffer<u16> out(terms * term);
  AttentionArgs a{};
  a.step = plan.step, a.q = q.data(), a.kv = kv.data(), a.sinks = sinks.data(), a.out = out.data(), a.out_term = term, a.page_bytes = page_bytes;
  a.head_bytes = (int)head_bytes, a.head_dim = head_dim, a.heads = heads, a.kv_heads = kv_heads, a.windowed = windowed;
  a.window = plan.window, a.out_rows = out_rows, a.terms = terms, a.format = format;
  const simt_kernel kernel = kv_format == FORMAT_F32 ? attention_plain_f32 : kv_format == FORMAT_F16 ? attention_plain_f16 : attention_plain_bf16;
  const int parts = kv_heads * ((group + 7) / 8);
  launch("attention_plain", kernel, rows * parts + 3, 256, a);
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < heads; h++) {
      const int p = plan.positions[r], first = first_key(p);
      std::vector<double> s, o(head_dim);
      double most = sinks[h] * (kv_format == FORMAT_F32 ? 1 : 1.4426950408889634), sink = most, sum = 0;
      for (int j = first; j <= p; j++) {
        double dot = 0;
        for (int d = 0; d < head_dim; d++) dot += q.exact[((size_t)r * heads + h) * head_dim + d] * get(at(r, j, h / group), kv_index(j, d, head_dim));
        s.push_back(kv_format == FORMAT_F32 ? dot / sqrt((double)head_dim) : dot);
        most = std::max(most, s.back());
      }
      auto power = [&](double v) { return kv_format == FORMAT_F32 ? exp(v) : exp2(v); };
      for (int j = first; j <= p; j++) {
        const double e = power(s[j - first] - most);
        sum += e;
        for (int d = 0; d < head_dim; d++) o[d] += e * get(at(r, j, h / group), KV_PAGE * head_dim + kv_index(j, d, head_dim));
      }
      sum += power(sink - most);
      for (int d = 0; d < head_dim; d++) {
        const double loose = kv_format == FORMAT_F32 ? 4e-7 : 1e-5;
        near(from_terms(out, tiled_index(r, h * head_dim + d, out_rows), term, terms, format), o[d] / sum, term_error(terms, format) + loose,
             term_floor(terms, format) + loose, "attention_plain");
      }
    }
  for (int k = width; k < slabs(width) * SLAB; k++) check(out[tiled_index(0, k, out_rows)] == 0, "attention_plain's filling");
  check(out.whole() && out[tiled_index(rows, 0, out_rows)] == 0xffff, "attention_plain's rows beyond");
  // A row computed alone has the same bits.
  for (int r = 0; r < std::min(rows, 2); r++) {
    StepHeader one = plan.header;
    one.rows = 1;
    Buffer<u16> alone(terms * term);
    AttentionArgs b = a;
    b.step.header = &one, b.step.positions += r, b.step.row_chunk += r, b.out = alone.data();
    b.q = (const unsigned char*)a.q + (size_t)r * width * bytes;
    launch("attention_plain", kernel, parts, 256, b);
    for (int t = 0; t < terms; t++)
      for (int k = 0; k < width; k++)
        check(alone[t * term + tiled_index(0, k, out_rows)] == out[t * term + tiled_index(r, k, out_rows)], "attention_plain alone");
  }
}

void test_empty() {
  StepHeader header{};
  Step step{};
  step.header = &header;
  int offsets[33], counts[32];
  LAUNCH(sort, 1, 1024, (SortArgs{step, nullptr, offsets, counts, nullptr, 32, 4}));
  check(offsets[0] == 0 && offsets[32] == 0 && counts[31] == 0, "sort of nothing");
  EmbedArgs e{}; e.step = step; LAUNCH(embed, 2, 256, e);
  NormArgs n{}; n.step = step; LAUNCH(rmsnorm, 2, 384, n);
  RouteArgs r{}; r.step = step; LAUNCH(route, 2, 512, r);
  NormRouteArgs b{}; b.norm = n, b.route = r, b.sends = 1; LAUNCH(norm_route, 2, 384, b);
  GatherArgs g{}; g.step = step; g.k_blocks = 2; LAUNCH(gather, 2, 256, g);
  LAUNCH(sort_gather, 2, 256, (SortGatherArgs{SortArgs{step, nullptr, offsets, counts, nullptr, 32, 4}, g}));
  RopeStoreArgs s{}; s.step = step; LAUNCH(rope_store, 2, 320, s);
  ArgmaxArgs m{}; m.step = step; LAUNCH(argmax, 2, 1024, m);
  DrawArgs w{}; w.step = step; LAUNCH(draw, 2, 256, w), LAUNCH_WIDE(2, w);
  ScoreArgs c{}; c.step = step; LAUNCH(score, 2, 256, c);
  AttentionArgs t{}; t.step = step; t.kv_heads = 2; t.heads = 2; LAUNCH(attention_plain_f32, 2, 256, t);
}
}  // namespace

int main(int argc, char** argv) {
  std::vector<int> orders = {SIMT_RANDOM, SIMT_ONE_WAVE_FIRST, SIMT_IN_ORDER};
  if (argc > 1) orders = {atoi(argv[1])};
  const std::string only = argc > 2 ? argv[2] : "";
  const auto run = [&](const char* name, const std::function<void()>& test) {
    if (only.empty() || only == name)
      for (int p : orders) policy = p, test();
  };
  run("empty", test_empty);
  run("upload", test_upload);
  run("embed", [] { for (int h : {32, 36, 2880}) test_embed(h); });
  run("norm", [] { for (int i = 0; i < 16; i++) test_norm(i % 3 == 0 ? 36 : i % 3 == 1 ? 96 : 2880, i & 1, i & 2, i & 4); });
  run("route", [] { for (int i = 0; i < 12; i++) test_route(i % 2 ? 36 : 2880, i % 3 == 0 ? 5 : i % 3 == 1 ? 32 : 128, i % 4 + 1, i & 2); test_route(64, 256, 8, true); });
  run("sort", [] { for (int r : {1, 31, 890, 1024, 1025, 3000}) test_sort(r, 32, 4); test_sort(70, 128, 8); test_sort(1100, 256, 2); test_sort(9, 3, 3); });
  run("gather", [] { test_gather(1, 45, 1); test_gather(37, 2, 2); test_gather(70, 3, 3); });
  run("sort_gather", [] {
    for (int rows : {1, 2, 31, 33, 70, 128}) test_gather(rows, 3, rows % 3 + 1, true);
    test_gather(100, 2, 1, true, 128, 8), test_gather(40, 1, 2, true, 256, 2), test_gather(9, 2, 1, true, 3, 3);
  });
  run("norm_route", [] {
    for (int i = 0; i < 12; i++) test_norm_route(i % 2 ? 36 : 2880, i % 3 == 0 ? 5 : i % 3 == 1 ? 32 : 128, i % 4 + 1, i & 2, i & 4);
    test_norm_route(64, 256, 8, true, true);
  });
  run("rope", [] {
    for (int format : {FORMAT_F16, FORMAT_BF16, FORMAT_F32})
      for (int w = 0; w < 2; w++)
        test_rope(64, 8, 2, format, w, false), test_rope(24, 3, 1, format, w, false), test_rope(8, 2, 2, format, w, false), test_rope(128, 4, 1, format, w, false),
            test_rope(64, 8, 2, format, w, true), test_rope(48, 3, 1, format, w, true);
  });
  run("argmax", [] { for (int c : {1, 100, 3143}) test_argmax(c, false), test_argmax(c, true), test_argmax(c, true, 29); });
  run("draw", [] {
    int wide = 0;
    for (float topp : {0.f, 1e-30f, 0.3f, 0.9f, 0.99999f})
      for (int vocab : {2, 37, 4095, 4096, 9001}) wide += test_draw(vocab, topp, 0) + test_draw(vocab, topp, 64);
    wide += test_draw(70 * 4096 + 5, 0.9f, 0);
    check(wide > 50, "draw_wide's rows that are decided", wide);
  });
  run("score", [] {
    int computed = 0;
    for (int vocab : {2, 19, 37, 2047, 2048, 9001, 20001}) computed += test_score(vocab);
    check(test_score(130 * 2048 + 5) + computed > 100, "score's rows that are computed", computed);
  });
  run("range", [] {
    test_range(FORMAT_BF16, 40, 36, 2), test_range(FORMAT_BF16, 256, 96, 1), test_range(FORMAT_MXFP4, 70, 64, 3);
  });
  run("gemm", [] {
    for (int i = 0; i < 4; i++) test_gemm(70, 36, 1, i & 1 ? FORMAT_F32 : FORMAT_BF16, i & 2), test_gemm(64, 2880 / (i + 1), 4, i & 1 ? FORMAT_F32 : FORMAT_BF16, i & 2);
    for (bool exact : {false, true})
      for (int cols : {32, 96, 2880}) test_gemm(70, cols, 1, FORMAT_MXFP4, exact), test_gemm(66, cols, 4, FORMAT_MXFP4, exact);
    test_codes();
    for (int format : {FORMAT_F16, FORMAT_BF16}) test_odd_gates(format, 1), test_odd_gates(format, format == FORMAT_F16 ? 2 : 3);
  });
  run("attention", [] {
    for (int format : {FORMAT_F32, FORMAT_F16, FORMAT_BF16})
      for (int w = 0; w < 2; w++)
        test_attention(64, 16, 2, format, w, 700), test_attention(24, 3, 1, format, w, 300), test_attention(32, 2, 1, format, w, 64),
            test_attention(128, 10, 1, format, w, 520), test_attention(8, 4, 2, format, w, 300);
  });
  printf("%d checks, %d wrong\n", checks, failures);
  return failures != 0;
}
