// norm_route_cluster8: see norm_route_cluster.h.
#include "norm_route_cluster.h"

static_assert(NORM_ROUTE_CLUSTER8_MOST_EXPERTS == NORM_ROUTE_CLUSTER8_THREADS / WAVE * NORM_ROUTE_CLUSTER8_CLUSTER,
              "a wave an expert");

NORM_ROUTE(norm_route_cluster8, NORM_ROUTE_CLUSTER8_THREADS, 1, NORM_ROUTE_CLUSTER8_CLUSTER)
