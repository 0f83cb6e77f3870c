/* engines.h - the list of engines, for a router that sends them requests. An engine serves from its
 * first commit on, as long as all of its ranks are alive. It does not serve while its memory is
 * overwritten, when it is torn, and after dray_subscriber_leave. Since 0.1. */
#ifndef DRAY_ENGINES_H
#define DRAY_ENGINES_H

#include <dray/subscriber.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_engines dray_engines;

typedef struct dray_engine_info {
    size_t size;
    const char *model, *group; /* borrowed until the next poll or wait */
    uint64_t version, incarnation;
    uint64_t epoch; /* grows whenever a rank was lost or the engine was dropped */
    uint32_t ranks, world;
    int32_t state;   /* dray_group_state */
    int32_t serving; /* 1: the engine can be sent requests */
    int32_t leaving; /* 1: dray_subscriber_leave was called */
} dray_engine_info;

#define DRAY_ENGINE_INFO_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_engine_info), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0                               \
    }

typedef enum dray_engine_event {
    DRAY_ENGINE_JOINED = 1, /* it serves now */
    DRAY_ENGINE_LEFT,       /* it does not serve any more */
    DRAY_ENGINE_UPDATED,    /* it serves another version */
    DRAY_ENGINE_TORN
} dray_engine_event;

/* Called by dray_engines_poll and dray_engines_wait. engine is borrowed for the call; of an engine
 * that is gone it has the last known values. */
typedef void (*dray_engines_fn)(void *user, dray_engine_event event,
                                const dray_engine_info *engine);

/* Watches all engines of the job. The caller closes *out before the context. One thread uses the
 * list at a time. After the coordinator was started again, engines that served count as serving for
 * 5 s, in which they register again. */
int dray_engines_open(dray_context *context, dray_engines **out, dray_error *error);
/* Updates the list and calls fn (may be NULL) for every change. The first call gives the present
 * list. Returns 0 when the list changed, DRAY_EAGAIN when it did not. DRAY_ECLOSED: the coordinator
 * ended, or was away for the context's timeout. Does not block, but where the coordinator is away
 * it tries to connect for up to 0.1 s, every 0.2 s. */
int dray_engines_poll(dray_engines *engines, dray_engines_fn fn, void *user, dray_error *error);
/* The same, but waits for a change. DRAY_ETIMEDOUT: nothing changed. */
int dray_engines_wait(dray_engines *engines, int64_t timeout_ns, dray_engines_fn fn, void *user,
                      dray_error *error);
/* A descriptor that is readable when dray_engines_poll may find a change; call that once before.
 * The list owns it, and it stays the same until the list is closed. */
int dray_engines_fd(dray_engines *engines);
uint32_t dray_engines_count(const dray_engines *engines);
/* Entry `index`, from 0. out: its size is set by the caller. DRAY_EINVALID: there is no such entry.
 */
int dray_engines_entry(const dray_engines *engines, uint32_t index, dray_engine_info *out,
                       dray_error *error);
void dray_engines_close(dray_engines *engines);

#ifdef __cplusplus
}
#endif
#endif
