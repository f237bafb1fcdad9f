// one_launch: the layers of a step of few decoding rows in one launch, in `fast`. Such a step takes as long as its
// launches, seven a layer, and here it has none of them.
//
// Commands. Each block runs the same list of commands (LayerCommand), one for each kernel that a layer has otherwise,
//           and calls the functions of that kernel for its share of the kernel's blocks: these, of one or four waves,
//           are spread over the launch's blocks first, and then over their waves. So all sums, and their bits, are
//           those of the separate kernels.
// Values    cross blocks without a barrier: handed_on.h says how. Each has memory of its own within the step, which is
//           written once, so no word is wiped while it may be polled: there are two such memories, and a launch uses
//           one and wipes the other. x is not updated in place: norm and attn_out read a row and write another.
//           Attention's partial sums and counters alone are those of all layers: a wave of attn_out has taken all rows'
//           outputs, so no layer's are needed when the next one's come.
// Waiting.  A command waits for values of commands before it alone, and all blocks are on the device at once. So some
//           block always goes on. If a value does not come all the same, for so long as the host says, all waves end,
//           and the host is told.
// Cache.    Keys and values of earlier steps were written before the launch. The newest ones are stored into the cache
//           for later steps, and handed on to attention beside it.
// Slots     of experts' rows have no gaps here: nothing needs them, and there is less to wipe.
//
// Grid: no more blocks than the device runs at once, and one a row at least. Rows: at most those that a stream takes.
#pragma once
#define ONE_LAUNCH
#include "../norm_few.h"
#include "../route.h"
#include "attention_decode.h"
#include "streamed.h"

enum : int { ONE_LAUNCH_WAVES = ONE_LAUNCH_THREADS / WAVE };

// Arguments that no kernel writes: they are read as a kernel's own.
#if defined(__AMDGCN__)
typedef const __attribute__((address_space(4))) LayerCommand* Commands;
#else
typedef const LayerCommand* Commands;
#endif
template <class Args> DEV const Args& args_of(const LayerCommand& command) { return *(const Args*)command.args; }

// Calls run(block) for the launch block's share of a kernel's blocks, of so many waves.
template <int WAVES, class Run> DEV void share_blocks(int blocks, Run run) {
  constexpr int AT_ONCE = ONE_LAUNCH_WAVES / WAVES;
  for (int block = uniform(TID / (WAVES * WAVE)) * GRID + BID; block < blocks; block += AT_ONCE * GRID) run(block);
}

// Fills the next step's memory with ones: pieces of 16 bytes.
DEV void wipe(const OneLaunchArgs& a) {
  for (int i = BID * ONE_LAUNCH_THREADS + TID; i < a.pieces; i += GRID * ONE_LAUNCH_THREADS)
    ((u32x4*)a.wiped)[i] = u32x4{NOT_YET, NOT_YET, NOT_YET, NOT_YET};
}

template <int FORMAT, template <int> class ExpertWeights> DEV void run_commands(const OneLaunchArgs& a) {
  SHARED f32x4 row[NORM_FEW_MOST_HIDDEN / 4];
  SHARED float scratch[ONE_LAUNCH_WAVES];
  SHARED Routing<1> routing;
  alignas(16) SHARED float sums[ONE_LAUNCH_WAVES][2 * PARTIAL_FLOATS];
  using Ops = Operations<FORMAT, 1>;
  // Waves that end leave others picks that nobody has made: these are experts, too.
  if (TID < ROUTE_MOST_EXPERTS_PER_TOKEN) routing.picks[0][TID] = 0;
  wait_at_most(a.patience, a.in_vain);
  wipe(a);
  Commands next = (Commands)a.commands;
  ROLLED for (int left = a.count; left > 0; left--, next++) {
    const LayerCommand& command = *(const LayerCommand*)next;
    switch (command.op) {
      case COMMAND_NORM:
        if (BID >= command.blocks) break;
        norm_few(args_of<NormArgs>(command), BID, command.to, scratch, [](int, const float*) {});
        barrier();
        break;
      case COMMAND_QKV:
        share_blocks<1>(command.blocks, [&](int block) {
          streamed_product<typename Ops::QkvStore, W16<FORMAT>, 1>(args_of<QkvStoreArgs>(command).product, block);
        });
        break;
      case COMMAND_ATTENTION:
        share_blocks<1>(command.blocks, [&](int block) {
          attention_decode<FORMAT>(args_of<AttentionArgs>(command), block, sums[TID / WAVE], command.newest);
        });
        break;
      case COMMAND_ATTN_OUT:
        share_blocks<1>(command.blocks, [&](int block) {
          streamed_product<typename Ops::AttnOut, W16<FORMAT>, 1>(args_of<GemmArgs>(command), block);
        });
        break;
      case COMMAND_ROUTE: {
        const NormRouteArgs& args = args_of<NormRouteArgs>(command);
        if (BID >= args.norm.step.header->rows) break;
        float* const t = (float*)row;
        norm_few(args.norm, BID, nullptr, scratch, [&](int k, const float* v) {
          UNROLL for (int j = 0; j < 8; j++) t[k + j] = v[j];
        });
        barrier();
        multiply_row<float, FORMAT_BF16, ONE_LAUNCH_THREADS>(args.route, t, 0, routing);
        pick_experts<ONE_LAUNCH_THREADS>(args.route, BID, 1, routing);
        barrier();
        break;
      }
      case COMMAND_MLP1:
        share_blocks<4>(command.blocks, [&](int block) {
          sorting_product<typename Ops::SortMlp1, ExpertWeights<FORMAT>, 4>(args_of<SortMlp1Args>(command), block);
        });
        break;
      case COMMAND_MLP2:
        share_blocks<4>(command.blocks, [&](int block) {
          streamed_product<typename Ops::Mlp2, ExpertWeights<FORMAT>, 4>(args_of<GemmArgs>(command), block);
        });
        break;
    }
  }
}
