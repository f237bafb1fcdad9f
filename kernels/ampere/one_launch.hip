// one_launch_*: see one_launch.h.
#include "one_launch.h"

KERNEL(one_launch_mxfp4_f16, OneLaunchArgs, THREADS, 1, 1) { run_layers(a); }
