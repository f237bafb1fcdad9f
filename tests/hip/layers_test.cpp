// Runs a step's layers as one launch and as launches of the separate kernels, several steps that follow each other, and
// compares rows and caches to the bit. Weights are random bytes: both read the same. Prints "the same", what differs,
// or the fault.
//
// layers_test TARGET ROWS BLOCKS OBJECTS...: rows of each step, blocks of the launch.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>

#include "../../kernels/args.h"
#include "emulator/launch.h"

using namespace emulator;

namespace {

constexpr int LAYERS = 3, STEPS = 3;
// Of the model. A row's span of gates and ups is no whole number of four row blocks.
constexpr int HIDDEN = 200, HEAD = 64, KV_HEADS = 2, HEADS = 8 * KV_HEADS, QUERY = HEADS * HEAD, INSIDE = 96;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HEAD, EXPERTS = 12, PICKS = 3, WINDOW = 100;
constexpr int MOST_ROWS = 8, POSITIONS = 1024, PAGES = 16, RING = 4, BLOCK_ROWS = 32;
constexpr int HEAD_BYTES = 2 * KV_PAGE * HEAD * 2, PAGE_BYTES = KV_HEADS * HEAD_BYTES;
constexpr int ONE_LAUNCH_THREADS = 512;

std::minstd_rand random_bits(1);
float random_value(float most) { return std::uniform_real_distribution<float>(-most, most)(random_bits); }

// Memory of the device, poisoned as it comes: not yet written.
Memory memory;
template <class T>
T* on_device(size_t count) {
  auto* at = static_cast<T*>(take_pages(sizeof(T) * count));
  memory.add({reinterpret_cast<u64>(at), sizeof(T) * count, 0, true});
  return at;
}
template <class T>
T* zeros(size_t count) {
  T* at = on_device<T>(count);
  std::memset(static_cast<void*>(at), 0, sizeof(T) * count);
  return at;
}
float* floats(size_t count, float most) {
  float* at = on_device<float>(count);
  for (size_t i = 0; i < count; i++) at[i] = random_value(most);
  return at;
}
u8* halves(size_t count, float most) {
  u16* at = on_device<u16>(count);
  for (size_t i = 0; i < count; i++) at[i] = to_f16(random_value(most)).bits;
  return reinterpret_cast<u8*>(at);
}

constexpr int slabs(int columns) { return (columns + SLAB - 1) / SLAB; }
constexpr int row_blocks(int rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

u8* matrix(int rows, int columns) {
  return halves(size_t{1} * row_blocks(rows) * BLOCK_ROWS * slabs(columns) * SLAB, 0.1f);
}
// Slabs of codes and scales. The high byte of a power of two as FP16, which scales are but on gfx950, or its exponent.
u8* experts(int rows, int columns, bool exponents) {
  const size_t count = size_t{EXPERTS} * row_blocks(rows) * slabs(columns), slab = BLOCK_ROWS * MXFP4_SLAB_BYTES;
  u8* at = on_device<u8>(count * slab);
  for (size_t i = 0; i < count * slab; i++) {
    const bool scale = i % slab >= BLOCK_ROWS * SLAB / 2;
    at[i] = static_cast<u8>(!scale ? random_bits() >> 8 : exponents ? 127 - 5 : 0x3c - 5 * 4);
  }
  return at;
}

struct Layer {
  u8 *qkv, *attn_out, *mlp1, *mlp2;
  float *qkv_bias, *attn_out_bias, *mlp1_bias, *mlp2_bias, *attn_norm, *ffn_norm, *sinks, *router_bias;
  u16* router;
  int windowed;
};

// A layer's values.
struct Values {
  float *from, *sums, *out;  // x before the layer, with the experts' outputs, with attention's
  u16 *t, *t2, *attention, *h, *newest;
  void *q, *y;
  int *experts, *slots, *counts, *offsets;
  float* shares;
  int rows, slots_of;  // rows of tiled buffers, and of those by slot
};

struct Plan {
  StepHeader* header;
  int *tokens, *positions, *row_chunk, *tables, *last_tokens;
  ChunkInfo* chunks;
  AttentionItem *full, *window;
};

struct Launched {
  const char* kernel;
  int op;  // a command's
  u32 threads;
  int blocks;
  std::vector<u8> args;
};
template <class Args>
Launched launched(const char* kernel, int op, u32 threads, int blocks, const Args& args) {
  const auto* bytes = reinterpret_cast<const u8*>(&args);
  return {kernel, op, threads, blocks, {bytes, bytes + sizeof args}};
}

struct Model {
  std::vector<Layer> layers;
  float *cos, *sin;
  Plan plan;
  float* partials;
  int* arrived;
};

Step step_of(const Plan& p) {
  return {p.header, p.tokens, p.positions, p.row_chunk, p.chunks, p.tables,     nullptr,
          p.full,   p.window, nullptr,     nullptr,     nullptr,  p.last_tokens};
}

GemmArgs product(const u8* weights, const float* bias, const u16* input, int in_rows, const int* rows, int groups,
                 int n, int columns) {
  GemmArgs a{};
  a.weights = weights, a.bias = bias, a.input = input, a.rows = rows;
  a.groups = groups, a.n = n, a.k_blocks = slabs(columns), a.row_blocks = row_blocks(n), a.in_rows = in_rows;
  a.scale = 1, a.limit = 7, a.format = FORMAT_F16, a.cols = columns, a.terms = 1, a.picked = PICKS;
  return a;
}

// The launches of a layer. `before`: the layer before, whose experts' outputs are to be added.
std::vector<Launched> launches(const Model& m, int layer, const Values& v, const Values* before, u8* cache, int bucket,
                               int items) {
  const Layer& w = m.layers[static_cast<size_t>(layer)];
  const Step step = step_of(m.plan);
  std::vector<Launched> all;
  const int* rows = &m.plan.header->rows;

  NormArgs norm{};
  norm.step = step, norm.x = v.from, norm.weight = w.attn_norm, norm.t = v.t, norm.k = PICKS, norm.hidden = HIDDEN;
  norm.t_rows = v.rows, norm.terms = 1, norm.format = FORMAT_F16, norm.y_format = FORMAT_F16;
  if (before) norm.y = before->y, norm.slots = before->slots, norm.shares = before->shares;
  all.push_back(launched(before ? "rmsnorm_few" : "rmsnorm", COMMAND_NORM, 384, bucket, norm));

  QkvStoreArgs qkv{};
  qkv.product = product(w.qkv, w.qkv_bias, v.t, v.rows, rows, 1, QKV, HIDDEN);
  qkv.product.half = HEAD / 2;
  RopeStoreArgs& store = qkv.store;
  store.step = step, store.cos = m.cos, store.sin = m.sin, store.q = v.q, store.kv = cache;
  store.page_bytes = PAGE_BYTES, store.head_bytes = HEAD_BYTES, store.format = FORMAT_F16, store.head_dim = HEAD;
  store.heads = HEADS, store.kv_heads = KV_HEADS, store.windowed = w.windowed, store.paired = 1;
  all.push_back(launched("qkv_store_w16_f16x1_n16", COMMAND_QKV, 64, row_blocks(QKV), qkv));

  AttentionArgs attention{};
  attention.step = step, attention.q = v.q, attention.kv = cache, attention.sinks = w.sinks,
  attention.out = v.attention;
  attention.partials = m.partials, attention.arrived = m.arrived, attention.page_bytes = PAGE_BYTES;
  attention.head_bytes = HEAD_BYTES, attention.head_dim = HEAD, attention.heads = HEADS, attention.kv_heads = KV_HEADS;
  attention.windowed = w.windowed, attention.window = WINDOW, attention.out_rows = v.rows, attention.terms = 1;
  attention.format = FORMAT_F16;
  all.push_back(launched("attention_decode_f16", COMMAND_ATTENTION, 64, items * KV_HEADS, attention));

  GemmArgs attn_out = product(w.attn_out, w.attn_out_bias, v.attention, v.rows, rows, 1, HIDDEN, QUERY);
  attn_out.out = v.out;
  all.push_back(launched("attn_out_w16_f16x1_n16", COMMAND_ATTN_OUT, 64, row_blocks(HIDDEN), attn_out));

  NormRouteArgs route{};
  route.norm = norm;
  route.norm.x = v.out, route.norm.weight = w.ffn_norm, route.norm.t = v.t2, route.norm.y = nullptr;
  route.norm.slots = nullptr, route.norm.shares = nullptr;
  route.route.step = step, route.route.w = w.router, route.route.bias = w.router_bias, route.route.experts = v.experts;
  route.route.shares = v.shares, route.route.format = FORMAT_BF16, route.route.hidden = HIDDEN;
  route.route.n_experts = EXPERTS, route.route.k = PICKS;
  all.push_back(launched("norm_route", COMMAND_ROUTE, 384, bucket, route));

  SortMlp1Args mlp1{};
  mlp1.product = product(w.mlp1, w.mlp1_bias, v.t2, v.rows, v.counts, EXPERTS, 2 * INSIDE, HIDDEN);
  mlp1.product.offsets = v.offsets, mlp1.product.tiled = v.h, mlp1.product.tiled_rows = v.slots_of;
  mlp1.sort.step = step, mlp1.sort.experts = v.experts, mlp1.sort.offsets = v.offsets, mlp1.sort.counts = v.counts;
  mlp1.sort.slots = v.slots, mlp1.sort.n_experts = EXPERTS, mlp1.sort.k = PICKS, mlp1.most_rows = bucket;
  const int places = std::min(bucket * PICKS, EXPERTS), spans = (row_blocks(2 * INSIDE) + 3) / 4;
  all.push_back(launched("sort_mlp1_mxfp4_f16x1_n16", COMMAND_MLP1, 256, 1 + places * spans, mlp1));

  GemmArgs mlp2 = product(w.mlp2, w.mlp2_bias, v.h, v.slots_of, v.counts, EXPERTS, HIDDEN, INSIDE);
  mlp2.offsets = v.offsets, mlp2.y = v.y;
  all.push_back(launched("mlp2_mxfp4_f16x1_n16", COMMAND_MLP2, 256, places * ((row_blocks(HIDDEN) + 3) / 4), mlp2));
  return all;
}

// Shares memory out, in multiples of 256 bytes.
struct Carver {
  u8* at;
  size_t used = 0;
  template <class T>
  T* take(size_t count) {
    T* const here = reinterpret_cast<T*>(at + used);
    used += (sizeof(T) * count + 255) / 256 * 256;
    return here;
  }
};

// Values of one layer of the launch; `x` are the rows before it.
Values carve(Carver& c, float* x, int rows) {
  Values v{};
  const size_t n = static_cast<size_t>(rows), tiled = n * SLAB;
  v.from = x, v.rows = rows, v.slots_of = rows * PICKS;
  v.sums = c.take<float>(n * HIDDEN), v.out = c.take<float>(n * HIDDEN);
  v.t = c.take<u16>(slabs(HIDDEN) * tiled), v.t2 = c.take<u16>(slabs(HIDDEN) * tiled);
  v.attention = c.take<u16>(slabs(QUERY) * tiled), v.h = c.take<u16>(slabs(INSIDE) * tiled * PICKS);
  v.newest = c.take<u16>(n * 2 * KV_HEADS * HEAD), v.q = c.take<u16>(n * QUERY);
  v.y = c.take<u16>(n * PICKS * HIDDEN), v.experts = c.take<int>(n * PICKS), v.slots = c.take<int>(n * PICKS);
  v.shares = c.take<float>(n * PICKS), v.counts = c.take<int>(EXPERTS), v.offsets = c.take<int>(EXPERTS + 1);
  return v;
}

std::map<std::string, Kernel*> kernels;
void run(const std::string& name, u32 threads, int blocks, const std::vector<u8>& args) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) throw std::runtime_error("no code object has " + name);
  run({found->second, 0, static_cast<u32>(blocks), threads, 0, args}, memory, {0});
}
void settle(const Model& m, const Values& last, int bucket) {
  NormArgs a{};
  a.step = step_of(m.plan), a.x = last.out, a.y = last.y, a.slots = last.slots, a.shares = last.shares;
  a.k = PICKS, a.hidden = HIDDEN, a.y_format = FORMAT_F16;
  const Launched one = launched("settle", 0, 384, bucket, a);
  run(one.kernel, one.threads, one.blocks, one.args);
}

// The plan of a step: rows of several lengths, the longer ones in items of a unit or a group each.
int write_plan(Plan& p, int rows, int step) {
  int full = 0, window = 0, partial = 0;
  for (int r = 0; r < rows; r++) {
    const int position = (r % 3 == 0 ? 3 : r % 3 == 1 ? 310 : 700) + 17 * r + step;
    p.positions[r] = position, p.row_chunk[r] = r, p.tokens[r] = 0;
    p.chunks[r] = {r, 1, position, r, r * PAGES, MOST_ROWS * PAGES + r * RING, RING, 0};
    const int units = position / ATTENTION_UNIT + 1, run = r % 2 ? 1 : ATTENTION_GROUP;
    const int parts = (units + run - 1) / run;
    if (parts == 1)
      p.full[full++] = {r, 0, position + 1, 1, 0, 0, -1, 0};
    else
      for (int part = 0; part < parts; part++) {
        const int from = part * run * ATTENTION_UNIT, to = std::min((part + 1) * run * ATTENTION_UNIT, position + 1);
        p.full[full++] = {r, part * run, to - from, parts, partial, run, -1, 0};
      }
    partial += parts;
    const int seen = std::min(WINDOW, position + 1);
    p.window[window++] = {r, (position + 1 - seen) / ATTENTION_UNIT, seen, 1, 0, 0, -1, 0};
  }
  *p.header = {rows, rows, 0, full, window, 0, 0, 0, 0};
  return std::max(full, window);
}

// One NaN is as good as another.
bool is_nan(u32 bits) { return (bits & 0x7fffffff) > 0x7f800000; }
bool is_nan(u16 bits) { return (bits & 0x7fff) > 0x7c00; }
template <class T>
bool same(const char* what, const void* a, const void* b, size_t bytes) {
  const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  for (size_t i = 0; i < bytes / sizeof(T); i++) {
    if (x[i] == y[i] || (is_nan(x[i]) && is_nan(y[i]))) continue;
    std::printf("differs: %s, number %zu is %08x, and not %08x\n", what, i, unsigned{y[i]}, unsigned{x[i]});
    return false;
  }
  return true;
}

void test(const std::string& target, int most_rows, int blocks) {
  Model m{};
  for (int i = 0; i < LAYERS; i++) {
    Layer w{};
    w.qkv = matrix(QKV, HIDDEN), w.attn_out = matrix(HIDDEN, QUERY);
    w.mlp1 = experts(2 * INSIDE, HIDDEN, target == "gfx950"), w.mlp2 = experts(HIDDEN, INSIDE, target == "gfx950");
    w.qkv_bias = floats(QKV, 1), w.attn_out_bias = floats(HIDDEN, 0.5f), w.mlp1_bias = floats(EXPERTS * 2 * INSIDE, 1);
    w.mlp2_bias = floats(EXPERTS * HIDDEN, 0.5f), w.attn_norm = floats(HIDDEN, 2), w.ffn_norm = floats(HIDDEN, 2);
    w.sinks = floats(HEADS, 1), w.router_bias = floats(EXPERTS, 1);
    w.router = on_device<u16>(EXPERTS * HIDDEN);
    for (int k = 0; k < EXPERTS * HIDDEN; k++) w.router[k] = static_cast<u16>(bit_cast<u32>(random_value(0.3f)) >> 16);
    w.windowed = i % 2;
    m.layers.push_back(w);
  }
  m.cos = floats(POSITIONS * HEAD / 2, 1), m.sin = floats(POSITIONS * HEAD / 2, 1);
  m.partials = on_device<float>(size_t{64} * KV_HEADS * PARTIAL_FLOATS), m.arrived = zeros<int>(MOST_ROWS * KV_HEADS);
  Plan& p = m.plan;
  p = {zeros<StepHeader>(1),
       zeros<int>(MOST_ROWS),
       zeros<int>(MOST_ROWS),
       zeros<int>(MOST_ROWS),
       zeros<int>(MOST_ROWS * (PAGES + RING)),
       zeros<int>(MOST_ROWS),
       zeros<ChunkInfo>(MOST_ROWS),
       zeros<AttentionItem>(64),
       zeros<AttentionItem>(64)};
  for (int i = 0; i < MOST_ROWS * (PAGES + RING); i++) p.tables[i] = (i * 7) % (MOST_ROWS * (PAGES + RING));
  constexpr size_t CACHE = size_t{MOST_ROWS} * (PAGES + RING) * PAGE_BYTES;
  std::vector<u8*> caches[2];
  for (int i = 0; i < LAYERS; i++) {
    caches[0].push_back(halves(CACHE / 2, 1)), caches[1].push_back(on_device<u8>(CACHE));
    std::memcpy(caches[1].back(), caches[0].back(), CACHE);
  }

  // Separate kernels: one memory for all layers, with room for slots that are GROUP_ALIGN apart.
  Values all = carve(*new Carver{zeros<u8>(1 << 20)}, zeros<float>(MOST_ROWS * HIDDEN), MOST_ROWS);
  all.sums = all.out = all.from;
  all.slots_of = MOST_ROWS * PICKS + (GROUP_ALIGN - 1) * (EXPERTS + 1);
  all.h = zeros<u16>(size_t{slabs(INSIDE)} * static_cast<size_t>(all.slots_of) * SLAB);
  all.y = zeros<u16>(static_cast<size_t>(all.slots_of) * HIDDEN);

  float* x = on_device<float>(MOST_ROWS * HIDDEN);
  constexpr size_t SET = 1 << 21;
  u8* sets[2] = {on_device<u8>(SET), on_device<u8>(SET)};
  size_t used[2] = {0, 0};
  auto* commands = on_device<LayerCommand>(LAYERS * 7);
  auto* in_vain = zeros<unsigned>(1);
  constexpr int PATIENCE = 1 << 20;
  for (int step = 0; step < STEPS; step++) {
    const int rows = std::max(1, most_rows - step), bucket = rows > 4 ? (rows > 6 ? 8 : 6) : rows;
    const int items = write_plan(p, rows, step) + 1;
    for (int i = 0; i < MOST_ROWS * HIDDEN; i++) x[i] = all.from[i] = random_value(2);
    if (step == 1) x[3] = all.from[3] = bit_cast<float>(~0u);
    for (int i = 0; i < LAYERS; i++) {
      const auto list = launches(m, i, all, i ? &all : nullptr, caches[0][static_cast<size_t>(i)], bucket, items);
      for (const Launched& one : list) run(one.kernel, one.threads, one.blocks, one.args);
    }
    settle(m, all, bucket);

    Carver carver{sets[step % 2]};
    std::vector<Values> values;
    size_t count = 0;
    for (int i = 0; i < LAYERS; i++) {
      values.push_back(carve(carver, i ? values.back().out : x, bucket));
      const Values& v = values.back();
      for (const Launched& one : launches(m, i, v, i ? &values[values.size() - 2] : nullptr,
                                          caches[1][static_cast<size_t>(i)], bucket, items)) {
        LayerCommand& command = commands[count++];
        command = {};
        command.op = one.op, command.blocks = one.blocks, command.newest = v.newest;
        command.from = v.sums;
        command.to = v.sums;
        std::memcpy(command.args, one.args.data(), std::min(one.args.size(), sizeof command.args));
        auto& norm = *reinterpret_cast<NormArgs*>(command.args);
        if (one.op == COMMAND_ROUTE || (one.op == COMMAND_NORM && !norm.y)) norm.k = 0;
        if (one.op == COMMAND_NORM && !norm.y) norm.select = -1;
      }
    }
    used[step % 2] = carver.used;
    const int pieces = static_cast<int>(used[1 - step % 2] / 16), n = static_cast<int>(count);
    const OneLaunchArgs args{commands, sets[1 - step % 2], in_vain, n, pieces, PATIENCE, 0};
    const Launched one = launched("one_launch_mxfp4_f16", 0, ONE_LAUNCH_THREADS, blocks, args);
    run(one.kernel, one.threads, one.blocks, one.args);
    if (*in_vain) return void(std::printf("waited in vain\n"));
    const auto* wiped = reinterpret_cast<const u32*>(sets[1 - step % 2]);
    for (size_t i = 0; i < SET / 4; i++)
      if (wiped[i] != ~0u) return void(std::printf("step %d: word %zu is not wiped\n", step, i));
    settle(m, values.back(), bucket);
    const size_t bytes = static_cast<size_t>(rows) * HIDDEN * 4;
    if (!same<u32>("rows", all.out, values.back().out, bytes)) return;
    for (size_t i = 0; i < LAYERS; i++)
      if (!same<u16>("cache", caches[0][i], caches[1][i], CACHE)) return;
  }
  std::printf("the same\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 1;
  for (int i = 4; i < argc; i++) {
    std::ifstream file(argv[i], std::ios::binary);
    Program* program = load_program(std::string(std::istreambuf_iterator<char>(file), {}), argv[1]);
    if (!program) return 1;
    memory.add({reinterpret_cast<u64>(program->image), program->bytes, ANY_DEVICE, false});
    for (auto& [name, kernel] : program->kernels) kernels[name] = &kernel;
  }
  try {
    test(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
  } catch (const std::runtime_error& fault) {
    std::printf("%s\n", fault.what());
  }
}
