/* Numbers of versions. Tests count theirs from 1. With DRAY_TEST_FIRST=0, the library gets each
 * number less one, and tests get back the numbers that they gave, so that a whole suite runs from
 * version 0. A number that stands for no version, such as that of an empty engine, stays 0. */
#pragma once

#include <dray/weights.h>
#include <stdlib.h>

static inline uint64_t numbers_less(void)
{
    const char *first = getenv("DRAY_TEST_FIRST");
    return first && first[0] == '0';
}

static inline uint64_t number_given(uint64_t number)
{
    return number ? number - numbers_less() : 0;
}

/* Converts a number that the library returned. `rc` is the result of the call that returned it.
 * `number` may be NULL. */
static inline int number_got(int rc, uint64_t *number)
{
    if (rc == DRAY_OK && number)
        *number += numbers_less();
    return rc;
}

typedef int number_update(dray_subscriber *s, const dray_update_options *options,
                          dray_update_report *report, dray_error *error);

static inline dray_update_options number_options(const dray_update_options *options)
{
    dray_update_options given = DRAY_UPDATE_OPTIONS_INIT;
    given = options ? *options : given;
    given.min_version = number_given(given.min_version);
    given.path_version = number_given(given.path_version);
    return given;
}

static inline int numbered_update(number_update *update, dray_subscriber *s,
                                  const dray_update_options *options, dray_update_report *report,
                                  dray_error *error)
{
    dray_update_options given = number_options(options);
    return number_got(update(s, options ? &given : NULL, report, error),
                      report ? &report->version : NULL);
}

typedef int number_start(dray_subscriber *s, const dray_update_options *options, dray_error *error);

static inline int numbered_start(number_start *start, dray_subscriber *s,
                                 const dray_update_options *options, dray_error *error)
{
    dray_update_options given = number_options(options);
    return start(s, options ? &given : NULL, error);
}

static inline int numbered_finish(dray_subscriber *s, dray_update_report *report, dray_error *error)
{
    return number_got(dray_update_finish(s, report, error), report ? &report->version : NULL);
}

static inline int numbered_version(dray_subscriber *s, uint64_t *version, uint64_t *incarnation,
                                   int32_t *state, dray_error *error)
{
    int32_t own;
    int rc = dray_subscriber_version(s, version, incarnation, &own, error);
    if (rc == DRAY_OK && state)
        *state = own;
    return rc || own == DRAY_GROUP_EMPTY ? rc : number_got(rc, version);
}

/* Returns an engine's version as a router is told of it. */
static inline uint64_t number_heard(const dray_engine_info *engine)
{
    return engine->version + (engine->state == DRAY_GROUP_EMPTY ? 0 : numbers_less());
}

#define dray_publisher_publish(p, version, ready, error)                                           \
    (dray_publisher_publish)(p, number_given(version), ready, error)
#define dray_publisher_deliver(p, version, groups, count, timeout, error)                          \
    (dray_publisher_deliver)(p, number_given(version), groups, count, timeout, error)
#define dray_publisher_wait(p, version, timeout, dropped, error)                                   \
    (dray_publisher_wait)(p, number_given(version), timeout, dropped, error)
#define dray_publisher_wait_stream(p, version, stream, timeout, error)                             \
    (dray_publisher_wait_stream)(p, number_given(version), stream, timeout, error)
#define dray_update_weights(s, options, report, error)                                             \
    numbered_update((dray_update_weights), s, options, report, error)
#define dray_prefetch_weights(s, options, report, error)                                           \
    numbered_update((dray_prefetch_weights), s, options, report, error)
#define dray_commit_weights(s, options, report, error)                                             \
    numbered_update((dray_commit_weights), s, options, report, error)
#define dray_update_start(s, options, error) numbered_start((dray_update_start), s, options, error)
#define dray_prefetch_start(s, options, error)                                                     \
    numbered_start((dray_prefetch_start), s, options, error)
#define dray_commit_start(s, options, error) numbered_start((dray_commit_start), s, options, error)
#define dray_update_finish(s, report, error) numbered_finish(s, report, error)
#define dray_subscriber_version(s, version, incarnation, state, error)                             \
    numbered_version(s, version, incarnation, state, error)
#define dray_checksums_fetch(context, model, version, out, error)                                  \
    number_got((dray_checksums_fetch)(context, model, version, out, error), version)
#define dray_checksums_fetch_group(context, model, group, version, out, error)                     \
    number_got((dray_checksums_fetch_group)(context, model, group, version, out, error), version)
