// norm_route_32x128: see norm_route_rows.h. Clusters of 32 rows, 128 experts.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_32x128, NORM_ROUTE_32X128, 1)
