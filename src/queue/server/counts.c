/* Counts waits and refusals (counts.h). */
#include "queue/server/counts.h"
#include "base/json.h"

#include "control/protocol.h"

const int64_t dray__wait_ends_us[DRAY__WAIT_BUCKETS - 1] = {
    10, 100, 1000, 10000, 100000, 500000, 1000000, 5000000, 10000000, 60000000, 600000000};

void dray__histogram_add(dray__histogram *h, int64_t ns)
{
    int bucket = 0;
    while (bucket < DRAY__WAIT_BUCKETS - 1 && ns > dray__wait_ends_us[bucket] * 1000)
        bucket++;
    h->buckets[bucket]++;
    h->count++;
    h->ns += ns > 0 ? (uint64_t)ns : 0;
}

static json_t *histogram_json(const dray__histogram *h, const char *request, const char *task)
{
    json_t *buckets = json_array();
    for (int i = 0; i < DRAY__WAIT_BUCKETS; i++)
        dray__json_append(&buckets, json_integer((json_int_t)h->buckets[i]));
    return json_pack("{s:s, s:s, s:I, s:f, s:o}", "request", request, "task", task, "count",
                     (json_int_t)h->count, "seconds", (double)h->ns / 1e9, "buckets", buckets);
}

json_t *dray__waits_json(const dray__waits *waits, const char *const *tasks, uint32_t task_count)
{
    static const char *const names[DRAY__WAIT_CLAIM] = {"insert", "wait", "refill"};
    json_t *array = json_array();
    for (uint32_t k = 0; k < DRAY__WAIT_CLAIM + task_count; k++) {
        bool claim = k >= DRAY__WAIT_CLAIM;
        if (waits->kinds[k].count)
            dray__json_append(&array, histogram_json(&waits->kinds[k], claim ? "claim" : names[k],
                                                     claim ? tasks[k - DRAY__WAIT_CLAIM] : ""));
    }
    return array;
}

void dray__refusals_add(dray__refusals *refusals, uint16_t type, int code)
{
    uint32_t request = type & 0xFFu;
    if (request < DRAY__REQUESTS && code < 0 && code > -DRAY__REQUESTS)
        refusals->counts[request][-code]++;
}

json_t *dray__refusals_json(const dray__refusals *refusals)
{
    json_t *array = json_array();
    for (uint32_t r = 0; r < DRAY__REQUESTS; r++)
        for (int code = 1; code < DRAY__REQUESTS; code++)
            if (refusals->counts[r][code])
                dray__json_append(
                    &array, json_pack("{s:s, s:s, s:I}", "request",
                                      dray__message_name((uint16_t)(DRAY__MSG_QUEUE_OPEN - 1 + r)),
                                      "error", dray_error_name(-code), "count",
                                      (json_int_t)refusals->counts[r][code]));
    return array;
}
