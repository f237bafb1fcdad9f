// norm_route_rows4x16: see norm_route_rows.h. A multiprocessor holds one block.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_rows4x16, NORM_ROUTE_ROWS4X16_PER_BLOCK, NORM_ROUTE_ROWS4X16_THREADS, 1,
                NORM_ROUTE_ROWS4X16_SHARED_BYTES)
