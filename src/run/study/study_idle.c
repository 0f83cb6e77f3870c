/* The time of a run's roles by state, from its rows. */
#include "run/study/study_read.h"

#include "base/json.h"

#include <stdio.h>
#include <string.h>

/* The pipeline fills in earlier steps. */
enum { FIRST_STEP = 2 };

static void add(json_t **sums, const char *what, const char *role, const char *cause,
                double seconds)
{
    char key[192];
    snprintf(key, sizeof(key), "%s.%s%s%s", what, role, cause ? "." : "", cause ? cause : "");
    double before = dray__json_number(*sums, key);
    dray__json_set(sums, key, json_real(before + seconds));
}

void dray__study_add_time(json_t **sums, const json_t *row)
{
    const char *role, *cause;
    json_t *time, *wait;
    if (dray__json_integer(row, "step") < FIRST_STEP)
        return;
    json_object_foreach(json_object_get(row, "time"), role, time)
    {
        double wall = dray__json_number(row, "step_seconds") * dray__json_number(time, "processes");
        add(sums, "whole", role, NULL, wall);
        add(sums, "busy", role, NULL, dray__json_number(time, "busy"));
        add(sums, "transfer", role, NULL, dray__json_number(time, "transfer"));
        json_object_foreach(json_object_get(time, "wait"), cause, wait)
        {
            add(sums, "idle", role, NULL, json_number_value(wait));
            add(sums, "idle", role, cause, json_number_value(wait));
        }
    }
}

/* Adds one key of a role, as a share of the time of the role's processes. */
static void set_share(const json_t *sums, const char *key, json_t *measures)
{
    char role[64], of[80];
    const char *from = strchr(key, '.') + 1, *to = strchrnul(from, '.');
    snprintf(role, sizeof(role), "%.*s", (int)(to - from), from);
    snprintf(of, sizeof(of), "whole.%s", role);
    double whole = dray__json_number(sums, of);
    if (whole <= 0 || strncmp(key, "whole.", 6) == 0)
        return;
    double share = dray__json_number(sums, key) / whole;
    json_object_set_new(measures, key, json_real(share));
    if (*to) /* a cause, which is in idle.ROLE already */
        return;
    snprintf(of, sizeof(of), "unaccounted.%s", role);
    const json_t *before = json_object_get(measures, of);
    double left = before ? json_number_value(before) : 1;
    json_object_set_new(measures, of, json_real(left - share));
}

void dray__study_set_shares(const json_t *sums, json_t *measures)
{
    const char *key;
    json_t *sum;
    json_object_foreach((json_t *)(uintptr_t)sums, key, sum)
    {
        set_share(sums, key, measures);
    }
}
