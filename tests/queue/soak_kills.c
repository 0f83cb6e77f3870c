/* Random cases of kills.h: any process, any step or moment, several times, for every durability. */
#include "queue/kills.h"

static const char *const steps[ROLES][9] = {
    [PRODUCER] = {"told", "kept", "wrote", "asking", "answered"},
    [CONSUMER] = {"asking", "answered"},
    [KEEPER] = {"keeping", "holding", "giving", "dropping"},
    [CONTROLLER] = {"handling", "handled", "writing", "written", "synced", "answering", "renaming",
                    "renamed"},
};

TEST(test_random_kills)
{
    for (int i = 0; i < test_times(250); i++) {
        uint64_t at = 1000000 + (uint64_t)i;
        uint32_t pick = (uint32_t)(dray__random_u64(seed, at, 0) % 1000000), known = 0;
        killing of = {.durability = DRAY_DURABILITY_NONE + (int32_t)(pick % 3),
                      .victim = (int)(pick / 3 % ROLES),
                      .power = pick / 12 % 2,
                      .large = pick / 24 % 40 == 0};
        while (steps[of.victim][known])
            known++;
        uint32_t step = pick / 960 % (known + 1); /* one more: a random moment */
        of.step = steps[of.victim][step];
        kill_case(&of, 1 + (int)(pick / 10000 % 4));
    }
}

int main(void)
{
    kills_begin();
    int failed = suite_run(NULL, NULL);
    fprintf(stderr, "%d processes killed\n", kills);
    return failed;
}
