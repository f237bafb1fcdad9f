// norm_route_16x32: see norm_route_rows.h. Clusters of 16 rows, 32 experts. Two blocks fit a multiprocessor.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_16x32, NORM_ROUTE_16X32, 2)
