// norm_route_pairs7: see norm_route_rows.h. A pair of blocks has fourteen rows, and a wave eight experts.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_pairs7, NORM_ROUTE_PAIRS7, 8, 1)
