// norm_route_rows7: see norm_route_rows.h. A block of seven rows, and four experts a wave.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_rows7, NORM_ROUTE_ROWS7, 4, 4)
