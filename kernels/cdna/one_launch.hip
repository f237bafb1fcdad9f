// one_launch_*: see one_launch.h.
#include "one_launch.h"

KERNEL(one_launch_mxfp4_f16, OneLaunchArgs, ONE_LAUNCH_THREADS, 1, 2) { run_commands<FORMAT_F16, Mxfp4>(a); }
KERNEL(one_launch_mxfp4_bf16, OneLaunchArgs, ONE_LAUNCH_THREADS, 1, 2) { run_commands<FORMAT_BF16, Mxfp4>(a); }
KERNEL(one_launch_w16_f16, OneLaunchArgs, ONE_LAUNCH_THREADS, 1, 2) { run_commands<FORMAT_F16, W16>(a); }
KERNEL(one_launch_w16_bf16, OneLaunchArgs, ONE_LAUNCH_THREADS, 1, 2) { run_commands<FORMAT_BF16, W16>(a); }
