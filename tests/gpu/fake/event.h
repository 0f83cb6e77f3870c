/* Events: what a stream, another stream and another process see of one. */
#pragma once

#include "fake.h"

/* Records are counted when they are asked for, and again when the stream comes to them: an event is
 * complete when both are equal, and a wait is for the records that were asked for before it. */
struct event_cell {
    uint32_t recorded, completed;
    uint32_t taken, serial;
    uint32_t unused[12];
};

void fake_cell_complete(event_cell *cell, uint32_t record);
/* Waits until the record is complete, or the process that was to complete it is dead. */
void fake_cell_wait(event_cell *cell, uint32_t record, pid_t owner, uint64_t start);
bool fake_cell_reached(const event_cell *cell, uint32_t record);
