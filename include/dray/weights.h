/* weights.h - weights from trainers to engines: all of the headers below. publisher.h and
 * subscriber.h are the two ends of an update. */
#ifndef DRAY_WEIGHTS_H
#define DRAY_WEIGHTS_H

#include <dray/checkpoint.h>
#include <dray/checksums.h>
#include <dray/engines.h>
#include <dray/load.h>
#include <dray/publisher.h>
#include <dray/subscriber.h>
#include <dray/tensor_list.h>

#endif
