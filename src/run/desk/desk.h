/* src/run/desk/: the built-in program for tasks that need no model. driver.c puts in the prompts of
 * each step and clears steps that are trained, refill.c replaces samples that are lost, reward.c
 * gives rewards, advantage.c computes advantages by each of the methods, and desk.c has the tasks
 * that call them.
 *
 * This header has the declarations that desk.c (tasks), driver.c and refill.c share. */
#pragma once

#include "queue/client/training.h"
#include "run/data/data.h"
#include "run/host/host.h"

typedef struct dray__driver dray__driver;

/* Starts the driver's thread: it makes the steps' prompts, watches the steps finish, and ends the
 * queue. It ends the process with an error when it cannot go on. */
int dray__driver_start(dray__host *host, dray__driver **out, dray_error *error);
/* Waits for the thread, which ends by itself once the queue has ended. With `now` it asks the
 * thread to end before that, because the host has failed. NULL is fine. */
void dray__driver_join(dray__driver *driver, bool now);

/* Takes the queue back to a checkpoint's cursor (dray_queue_resume; NULL when there is none),
 * before any role claims. Clears all evaluations, and the steps that then have only their prompts
 * left; they are inserted again when their turn comes. With eval_first it clears all steps, because
 * the checkpoint's evaluation comes first. When the schedule is not exact, prompts do not belong to
 * a version, and steps stay in the queue; but all are cleared when the job has a value model and
 * trains complete samples first. */
int dray__driver_resume(dray_queue *queue, const dray__job *job, const void *cursor, size_t size,
                        bool eval_first, dray_error *error);
/* Sets how many samples may be made, by the trainer's version. Does nothing when the schedule is
 * exact. */
int dray__driver_admit(dray_queue *queue, const dray__job *job, int64_t version, dray_error *error);

/* *step is the newest step whose prompts are in the queue; -1 when there is none. */
int dray__driver_newest(dray_queue *queue, int64_t *step, dray_error *error);

typedef struct dray__refiller dray__refiller;

/* Starts the thread that replaces lost samples until the queue has ended. It ends the process with
 * an error when it cannot go on. data and feed are borrowed. */
int dray__refiller_start(dray__host *host, const dray__data *data, const dray__feed *feed,
                         dray__refiller **out, dray_error *error);
/* Sets the oldest step that is not trained yet. Lost samples of earlier steps are forgotten. */
void dray__refiller_oldest(dray__refiller *refiller, int64_t step);
void dray__refiller_join(dray__refiller *refiller, bool now); /* as dray__driver_join */
