// attention_decode and attention_prefill of CDNA against float64.
//
//   attention_test [policy [seed]]
//
// tests/programs/amd.sh runs it with machine code in an emulator, where `policy` chooses how many shapes there are: 0
// is all. With kernels compiled for the SIMT machine it is also the order of threads: 1 random, 2 one wave first.
//
// The tolerance is a few units in the last place of weights and outputs, 2^-11 in FP16 and 2^-8 in BF16. They are
// largest in an output of three times the typical size.
#include "../gpu/gpu.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>
#include <vector>

extern "C" {
void attention_decode_f16(const void*);
void attention_decode_bf16(const void*);
void attention_prefill_f16(const void*);
void attention_prefill_bf16(const void*);
}

static const int DIM = 64, HEADS_OF_GROUP = 8, PREFILL_ROWS = 32;
static int policy = 0;
static u64 seed = 1;
static int failures = 0;

static u64 mixed(u64 x) {
  x = (x ^ x >> 31) * 0x7fb5d329728ea185ull;
  x = (x ^ x >> 27) * 0x81dadef4bc2dd44dull;
  return x ^ x >> 33;
}
static float normal(u64 key) {               // sum of four uniforms, unit variance
  const u64 r = mixed(key);
  float sum = 0;
  for (int i = 0; i < 4; i++) sum += (float)(r >> 16 * i & 0xffff) / 65536 - 0.5f;
  return sum * 1.7320508f;
}
static u16 to_format(int format, float v) { return format == FORMAT_F16 ? to_f16(v) : to_bf16(v); }
static float from_format(int format, u16 v) { return format == FORMAT_F16 ? f16_to_f32(v) : bf16_to_f32(v); }

struct Layer { int format, kv_heads, windowed, window; float query_scale, sink_mean; };

// A chunk of a sequence. `id` determines the sequence's elements, whatever row it has and whatever other chunks there
// are. Its first `shared` keys and values may be those of the sequence before, in the same pages.
struct Sequence { int id, first_position, rows, shared = 0; };

// Keys, values and queries of sequences, functions of the id alone. Each is generated once per layer.
struct Elements {
  Layer layer;
  // by kind, sequence and head: DIM elements per position
  std::map<std::tuple<int, int, int>, std::vector<float>> made;

  // The DIM elements at a position. The next call may move them.
  const float* at(int kind, int id, int head, int position) {
    std::vector<float>& all = made[{kind, id, head}];
    while ((int)all.size() <= position * DIM) {
      const int p = (int)all.size() / DIM;
      for (int d = 0; d < DIM; d++) {
        const u64 key = ((((u64)id * 8 + kind) * 64 + head) * 65536 + p) * 64 + d;
        const float scale = kind == 2 ? layer.query_scale * 1.4426950f / 8 : 1;
        all.push_back(from_format(layer.format, to_format(layer.format, normal(key) * scale)));
      }
    }
    return &all[(size_t)position * DIM];
  }
};
static bool operator==(const Layer& a, const Layer& b) {
  return a.format == b.format && a.kv_heads == b.kv_heads && a.windowed == b.windowed && a.window == b.window &&
         a.query_scale == b.query_scale && a.sink_mean == b.sink_mean;
}
static const float* elements(const Layer& layer, int kind, int id, int head, int position) {
  static Elements kept;
  if (!(kept.layer == layer)) kept = {layer, {}};
  return kept.at(kind, id, head, position);
}
static float sink_of(const Layer& layer, int head) { return layer.sink_mean + normal(head + 77777) * 2; }

// All buffers of one launch, each exactly as large as it must be, all poisoned.
struct World {
  Layer layer;
  std::vector<Sequence> sequences;
  std::vector<int> positions, row_chunk, tables;
  std::vector<ChunkInfo> chunks;
  std::vector<AttentionItem> items;
  std::vector<PrefillTile> tiles;
  StepHeader header = {};
  std::vector<u16> q, out;
  std::vector<u8> kv;
  std::vector<float> sinks, partials;
  std::vector<int> arrived;
  int head_bytes, out_rows;
  i64 page_bytes;
  AttentionArgs args = {};

  World(const Layer& l, const std::vector<Sequence>& s) : layer(l), sequences(s) {
    head_bytes = 4 * DIM * KV_PAGE + 768, page_bytes = (i64)layer.kv_heads * head_bytes + 256;
    lay_out();
    fill();
    sinks.resize(layer.kv_heads * HEADS_OF_GROUP);
    for (size_t h = 0; h < sinks.size(); h++) sinks[h] = sink_of(layer, (int)h);
    out_rows = header.rows + 3;
    out.assign((size_t)sinks.size() * out_rows * DIM, 0xffff);
    arrived.assign((size_t)header.rows * layer.kv_heads, 0);
  }
  void lay_out() {
    std::vector<int> lengths;
    int pages = 0;
    for (const Sequence& s : sequences) {
      const int all = (s.first_position + s.rows + KV_PAGE - 1) / KV_PAGE;
      const int ring = (layer.window + s.rows + KV_PAGE - 2) / KV_PAGE + 1 + (int)(mixed(s.id + 5) % 3);
      const int length = layer.windowed ? ring : all, at = (int)tables.size();
      const int full = layer.windowed ? 1 << 28 : at, window = layer.windowed ? at : 1 << 28;
      ChunkInfo c = {header.rows, s.rows, s.first_position, 0, full, window, ring, 0};
      for (int r = 0; r < s.rows; r++)
        positions.push_back(s.first_position + r), row_chunk.push_back((int)chunks.size());
      header.rows += s.rows;
      chunks.push_back(c);
      lengths.push_back(length);
      for (int i = 0; i < length; i++) tables.push_back(pages++);
    }
    header.chunks = (int)chunks.size();
    for (int i = pages - 1; i > 0; i--) std::swap(tables[i], tables[mixed(i * 31 + seed) % (i + 1)]);   // scattered
    for (size_t s = 1; s < sequences.size(); s++)
      std::copy_n(&tables[chunks[s - 1].full], sequences[s].shared / KV_PAGE, &tables[chunks[s].full]);
    kv.assign((size_t)(pages * page_bytes), 0xff);
  }
  const int* page_of(int s, int position) const {
    const ChunkInfo& c = chunks[s];
    return &tables[layer.windowed ? c.window + position / KV_PAGE % c.window_pages : c.full + position / KV_PAGE];
  }
  // Whose keys and values a sequence has at a position.
  int id_at(int s, int position) const { return sequences[position < sequences[s].shared ? s - 1 : s].id; }
  void fill() {
    q.resize((size_t)header.rows * layer.kv_heads * HEADS_OF_GROUP * DIM);
    for (int s = 0; s < (int)sequences.size(); s++) {
      const Sequence& x = sequences[s];
      for (int p = 0; p < x.first_position + x.rows; p++) for (int h = 0; h < layer.kv_heads; h++) {
        u16* k = (u16*)(kv.data() + *page_of(s, p) * page_bytes + (i64)h * head_bytes);
        for (int v = 0; v < 2; v++) {
          const float* from = elements(layer, v, id_at(s, p), h, p);
          for (int d = 0; d < DIM; d++) k[v * KV_PAGE * DIM + kv_index(p, d, DIM)] = to_format(layer.format, from[d]);
        }
      }
      for (int r = 0; r < x.rows; r++) for (int h = 0; h < layer.kv_heads * HEADS_OF_GROUP; h++) {
        const float* from = elements(layer, 2, x.id, h, x.first_position + r);
        u16* to = &q[(((size_t)chunks[s].first_row + r) * layer.kv_heads * HEADS_OF_GROUP + h) * DIM];
        for (int d = 0; d < DIM; d++) to[d] = to_format(layer.format, from[d]);
      }
    }
  }
  int first_key(int position) const { return layer.windowed ? std::max(0, position - layer.window + 1) : 0; }

  // Work items of `run` units each, at absolute positions: units, groups or spans. A row that is not longer is one
  // item, wherever it begins.
  void plan_decode(int run) {
    int sums = 0;
    for (int row = 0; row < header.rows; row++) {
      const int first = first_key(positions[row]) / ATTENTION_UNIT, end = positions[row] / ATTENTION_UNIT + 1;
      const bool whole = positions[row] + 1 - first_key(positions[row]) <= run * ATTENTION_UNIT;
      std::vector<AttentionItem> parts;
      for (int u = first; u < end;) {
        const int next = whole ? end : std::min(end, (u / run + 1) * run);
        const int keys = std::min(next * ATTENTION_UNIT, positions[row] + 1) - u * ATTENTION_UNIT;
        parts.push_back({row, u, keys, 0, sums, run, -1, 0});
        u = next;
      }
      for (AttentionItem& p : parts) p.row_items = (int)parts.size();
      if (parts.size() > 1) sums += (int)parts.size();
      items.insert(items.end(), parts.begin(), parts.end());
    }
    std::sort(items.begin(), items.end(), [](auto& a, auto& b) { return a.tokens > b.tokens; });
    partials.assign((size_t)sums * layer.kv_heads * PARTIAL_FLOATS, NAN);
    (layer.windowed ? header.window_items : header.full_items) = (int)items.size();
  }
  // Each row's items that are of shared keys go to the row before, whose items they are as well.
  void share_items() {
    const auto of = [&](int row, int unit) {
      return *std::find_if(items.begin(), items.end(), [&](auto& i) { return i.row == row && i.first_unit == unit; });
    };
    for (AttentionItem& item : items) {
      const int other = item.row + 1, end = (item.first_unit + ATTENTION_GROUP) * ATTENTION_UNIT;
      if (other == header.rows || end > sequences[other].shared) continue;
      item.second = other, item.second_partial = of(other, item.first_unit).partial;
    }
    const auto has_another = [&](auto& item) {
      return (item.first_unit + ATTENTION_GROUP) * ATTENTION_UNIT <= sequences[item.row].shared;
    };
    items.erase(std::remove_if(items.begin(), items.end(), has_another), items.end());
    header.full_items = (int)items.size();
  }
  void plan_prefill(int tile_rows) {
    for (int c = 0; c < header.chunks; c++)
      for (int r = 0; r < chunks[c].rows; r += tile_rows)
        tiles.push_back({c, r, std::min(tile_rows, chunks[c].rows - r), 0});
    header.prefill_tiles = (int)tiles.size();
  }
  void launch(simt_kernel kernel, int threads, int blocks) {
    args.step.header = &header, args.step.positions = positions.data(), args.step.row_chunk = row_chunk.data();
    args.step.chunks = chunks.data(), args.step.tables = tables.data(), args.step.prefill_tiles = tiles.data();
    (layer.windowed ? args.step.window_items : args.step.full_items) = items.data();
    args.q = q.data(), args.kv = kv.data(), args.sinks = sinks.data();
    args.out = out.data(), args.partials = partials.data();
    args.arrived = arrived.data(), args.page_bytes = page_bytes, args.head_bytes = head_bytes;
    args.format = layer.format, args.head_dim = DIM;
    args.heads = (int)sinks.size(), args.kv_heads = layer.kv_heads;
    args.windowed = layer.windowed, args.window = layer.window, args.out_rows = out_rows, args.terms = 1;
    char message[256];
    if (simt_launch(kernel, blocks, threads, 0, &args, sizeof args, 2, policy, seed, message, sizeof message)) {
      printf("launch: %s\n", message);
      exit(1);
    }
  }
  void decode(int run) {
    plan_decode(run);
    decode_items();
  }
  void decode_two_by_two() {
    plan_decode(ATTENTION_GROUP);
    share_items();
    decode_items();
  }
  void decode_items() {
    launch(layer.format == FORMAT_F16 ? attention_decode_f16 : attention_decode_bf16, 64,
           (int)items.size() * layer.kv_heads + 5);
  }
  void prefill(int tile_rows) {
    plan_prefill(tile_rows);
    launch(layer.format == FORMAT_F16 ? attention_prefill_f16 : attention_prefill_bf16, 256,
           (int)tiles.size() * layer.kv_heads + 2);
  }
  std::vector<u16> row(int r) const {
    std::vector<u16> o;
    for (size_t k = 0; k < sinks.size() * DIM; k++) o.push_back(out[tiled_index(r, (int)k, out_rows)]);
    return o;
  }
  // The largest error against float64, relative to a row's typical output. Checks also that nothing else is written.
  double error() const {
    double worst = 0;
    for (int r = 0; r < header.rows; r++) {
      const int s = row_chunk[r], id = sequences[s].id, last = positions[r];
      const std::vector<u16> got = row(r);
      for (int h = 0; h < (int)sinks.size(); h++) {
        std::vector<double> w;
        double top = sink_of(layer, h) * 1.4426950408889634, sum, o[DIM] = {};
        const float* query = elements(layer, 2, id, h, last);
        for (int p = first_key(last); p <= last; p++) {
          const float* key = elements(layer, 0, id_at(s, p), h / HEADS_OF_GROUP, p);
          double x = 0;
          for (int d = 0; d < DIM; d++) x += (double)query[d] * key[d];
          w.push_back(x), top = std::max(top, x);
        }
        sum = std::exp2(sink_of(layer, h) * 1.4426950408889634 - top);
        for (size_t i = 0; i < w.size(); i++) {
          const double e = std::exp2(w[i] - top);
          sum += e;
          const int p = first_key(last) + (int)i;
          const float* value = elements(layer, 1, id_at(s, p), h / HEADS_OF_GROUP, p);
          for (int d = 0; d < DIM; d++) o[d] += e * value[d];
        }
        double size = 0, wrong = 0;
        for (int d = 0; d < DIM; d++) {
          size += o[d] / sum * o[d] / sum;
          const double e = std::fabs(o[d] / sum - from_format(layer.format, got[h * DIM + d]));
          wrong = std::isnan(e) ? INFINITY : std::max(wrong, e);
        }
        worst = std::max(worst, wrong / (std::sqrt(size / DIM) + 1e-5));
      }
    }
    for (int r = header.rows; r < out_rows; r++) for (u16 v : row(r)) if (v != 0xffff) return INFINITY;
    for (int n : arrived) if (n != 0) return INFINITY;
    return worst;
  }
};

static void report(const char* what, const Layer& l, double error, bool same) {
  const bool ok = same && error < (l.format == FORMAT_F16 ? 3e-3 : 2.5e-2);
  failures += !ok;
  printf("%-7s %s kv_heads %d %s %4d, q x %4.1f, sinks %5.1f: worst error %.1e, %s%s\n", what,
         l.format == FORMAT_F16 ? "f16 " : "bf16",
         l.kv_heads, l.windowed ? "window" : "full  ", l.window, l.query_scale, l.sink_mean, error,
         same ? "same bits in any company" : "BITS DIFFER", ok ? "" : "  WRONG");
}

static void check_decode(const Layer& layer, const std::vector<int>& contexts) {
  std::vector<Sequence> all;
  for (size_t i = 0; i < contexts.size(); i++) all.push_back({(int)i + 1, contexts[i] - 1, 1});
  double error = 0;
  bool same = true;
  std::vector<std::vector<u16>> rows;
  for (int run : {16, 4, 1}) {
    World w(layer, all);
    w.decode(run);
    error = std::max(error, w.error());
    for (size_t i = 0; i < all.size(); i++) {
      if (run == 16) rows.push_back(w.row((int)i));
      same &= rows[i] == w.row((int)i);
    }
  }
  for (size_t i = 0; i < all.size(); i++) {
    World w(layer, {all[i]});
    w.decode(i % 2 ? 4 : 1);
    same &= rows[i] == w.row(0);
  }
  report("decode", layer, error, same);
}

// Rows that share keys two by two, by items of both, have the bits that they have by items of their own.
static void check_shared(const Layer& layer, const std::vector<Sequence>& sequences) {
  World alone(layer, sequences), together(layer, sequences);
  alone.decode(ATTENTION_GROUP);
  together.decode_two_by_two();
  const size_t all = alone.items.size(), both = together.items.size();
  bool same = both < all;
  for (size_t i = 0; i < sequences.size(); i++) same &= alone.row((int)i) == together.row((int)i);
  report("shared", layer, together.error(), same);
}

// The same positions of one sequence, cut in several ways, must give the same bits.
static void check_prefill(const Layer& layer, int from, int rows) {
  std::vector<std::vector<u16>> want;
  double error = 0;
  bool same = true;
  const auto compare = [&](const World& w, int at, int first, int n) {
    for (int i = 0; i < n; i++) same &= w.row(at + i) == want[first + i];
  };
  {
    World w(layer, {{9, from, rows}});
    w.prefill(PREFILL_ROWS);
    error = w.error();
    for (int r = 0; r < rows; r++) want.push_back(w.row(r));
  }
  for (int tile_rows : {1, 7, 31}) {
    if (tile_rows == 1 && rows > 80) continue;
    World w(layer, {{4, 11, 3}, {9, from, rows}, {5, 0, 2}});
    w.prefill(tile_rows);
    error = std::max(error, w.error());
    compare(w, 3, 0, rows);
  }
  for (int cut : {1, rows / 3, rows - 1}) {
    if (cut <= 0 || cut >= rows) continue;
    World head(layer, {{9, from, cut}}), tail(layer, {{9, from + cut, rows - cut}});
    head.prefill(PREFILL_ROWS), tail.prefill(PREFILL_ROWS);
    compare(head, 0, 0, cut), compare(tail, 0, cut, rows - cut);
  }
  report("prefill", layer, error, same);
}

// A launch without rows reads and writes nothing.
static void check_empty(const Layer& layer) {
  World w(layer, {});
  w.decode(1), w.prefill(PREFILL_ROWS);
  report("empty", layer, w.error(), true);
}

int main(int argc, char** argv) {
  if (argc > 1) policy = atoi(argv[1]);
  if (argc > 2) seed = strtoull(argv[2], nullptr, 10);
  const std::vector<int> ragged = {1,   2,   16,  31,  32,  33,  63,  64,  65,  127, 128, 129, 160,
                                   192, 193, 255, 256, 257, 300, 385, 511, 512, 513, 640, 700};
  const bool quick = policy != 0;
  for (int format : {FORMAT_F16, FORMAT_BF16}) {
    check_empty({format, 2, 0, 128, 1, 0});
    check_decode({format, 2, 0, 128, 1, 0}, ragged);
    check_decode({format, 1, 1, 128, 1, 0}, ragged);
    check_decode({format, 3, 1, 100, 8, 0}, {1, 99, 100, 101, 227, 356, 700});
    check_decode({format, 1, 1, 1, 1, 0}, {1, 2, 64, 65, 128, 129});
    check_decode({format, 1, 0, 128, 10, -5}, {40, 333, 600});
    check_decode({format, 1, 0, 128, 1, 9}, {3, 130, 700});
    check_decode({format, 1, 1, 128, 1, -INFINITY}, {1, 130, 700});
    check_shared({format, 2, 0, 128, 2, 0}, {{1, 599, 1}, {2, 1200, 1, 512}});
    check_shared({format, 1, 0, 128, 10, -5},
                 {{1, 700, 1}, {2, 512, 1, 512}, {3, 40, 1}, {4, 1100, 1}, {5, 1300, 1, 1024}});
    if (!quick) check_shared({format, 1, 0, 128, 2, 0}, {{1, 3000, 1}, {2, 2700, 1, 2560}});
    if (!quick) check_decode({format, 1, 0, 128, 2, 0}, {2049, 2500, 5000});
    if (!quick) check_decode({format, 1, 1, 1000, 2, 0}, {900, 1000, 1001, 1500, 2600, 4100});
    check_prefill({format, 2, 0, 128, 1, 0}, 0, 70);
    check_prefill({format, 1, 0, 128, 1, 0}, 37, 33);
    check_prefill({format, 1, 1, 128, 1, 0}, 0, quick ? 150 : 300);
    check_prefill({format, 1, 1, 100, 8, 2}, 201, 80);
    check_prefill({format, 1, 1, 1, 1, 0}, 60, 8);
    check_prefill({format, 1, 0, 128, 10, -5}, 300, 50);
    check_prefill({format, 1, 0, 128, 1, 9}, 64, 64);
    check_prefill({format, 1, 1, 100, 1, -INFINITY}, 0, 150);
  }
  puts(failures ? "FAILED" : "ok");
  return failures != 0;
}
