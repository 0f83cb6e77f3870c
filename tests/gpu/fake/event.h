/* Events, as a stream, another stream and another process see them. */
#pragma once

#include "fake.h"

/* Records are counted when they are requested, and again when the stream reaches them. An event is
 * complete when both counts are equal. A wait is for the records that were requested before it. */
struct event_cell {
    uint32_t recorded, completed;
    uint32_t taken, serial;
    uint32_t unused[12];
};

void fake_cell_complete(event_cell *cell, uint32_t record);
/* Waits until the record is complete, or until the process that would complete it is dead. */
void fake_cell_wait(event_cell *cell, uint32_t record, pid_t owner, uint64_t start);
bool fake_cell_reached(const event_cell *cell, uint32_t record);
