// pack_mxfp4, pack_w16: see pack.h.
#include "../mma/pack.h"
