#include "mxfp4_f16.h"

MXFP4_F16_TILES(mlp2, Mlp2)
