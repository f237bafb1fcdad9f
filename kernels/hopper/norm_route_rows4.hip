// norm_route_rows4: see norm_route_rows.h. A block of four rows, and four experts a wave.
#include "norm_route_rows.h"

NORM_ROUTE_ROWS(norm_route_rows4, NORM_ROUTE_ROWS4, 4, 4)
