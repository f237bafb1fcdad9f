// norm_route_32x32: see norm_route_rows.h. Clusters of 32 rows, 32 experts.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_32x32, NORM_ROUTE_32X32, 1)
