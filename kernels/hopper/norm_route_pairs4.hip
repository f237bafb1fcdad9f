// norm_route_pairs4: see norm_route_rows.h. A pair of blocks has eight rows, and a wave eight experts.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_pairs4, NORM_ROUTE_PAIRS4, 8, 2)
