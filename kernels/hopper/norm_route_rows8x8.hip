// norm_route_rows8x8: see norm_route_rows.h. A multiprocessor holds two blocks, whose norms and products overlap.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_rows8x8, NORM_ROUTE_ROWS8X8_PER_BLOCK, NORM_ROUTE_ROWS8X8_THREADS, 2,
                NORM_ROUTE_ROWS8X8_SHARED_BYTES)
