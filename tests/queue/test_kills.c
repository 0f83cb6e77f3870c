/* Kills every process at every step once, and at a few random moments (kills.h). soak_kills has the
 * rest. */
#include "queue/kills.h"

static const char *const steps[ROLES][8] = {
    [PRODUCER] = {"told", "kept", "wrote", "asking", "answered"},
    [CONSUMER] = {"asking", "answered"},
    [KEEPER] = {"keeping", "holding", "giving", "dropping"},
    [CONTROLLER] = {"handling", "handled"},
};
static const char *const journal_steps[] = {"writing", "written", "synced", "answering"};

/* A case takes seconds under a sanitizer: a short run has a third of them, by the seed. */
static void kill_some(const killing *k, int times)
{
    static uint64_t number;
    if (!test_is_short() || (seed + number++) % 3 == 0)
        kill_case(k, times);
}

static void kill_at_every_step(int32_t durability)
{
    for (int victim = 0; victim < ROLES; victim++) {
        for (int i = 0; i < 8 && steps[victim][i]; i++)
            kill_some(
                &(killing){.durability = durability, .victim = victim, .step = steps[victim][i]},
                test_times(1));
        for (int i = 0; i < test_times(1); i++)
            kill_some(&(killing){.durability = durability, .victim = victim}, 1);
    }
}

TEST(test_without_durability)
{
    kill_at_every_step(DRAY_DURABILITY_NONE);
}

TEST(test_with_checkpoints)
{
    kill_at_every_step(DRAY_DURABILITY_CHECKPOINT);
}

TEST(test_with_a_journal)
{
    kill_at_every_step(DRAY_DURABILITY_JOURNAL);
    for (size_t i = 0; i < sizeof journal_steps / sizeof *journal_steps; i++)
        for (int power = 0; power < 2; power++)
            kill_some(&(killing){.durability = DRAY_DURABILITY_JOURNAL,
                                 .victim = CONTROLLER,
                                 .step = journal_steps[i],
                                 .power = power},
                      1);
}

TEST(test_while_a_journal_is_compacted)
{
    static const char *const names[] = {"renaming", "renamed"};
    for (int i = 0; i < 2; i++)
        kill_some(&(killing){.durability = DRAY_DURABILITY_JOURNAL,
                             .victim = CONTROLLER,
                             .step = names[i],
                             .power = true,
                             .large = true},
                  1);
}

int main(void)
{
    kills_begin();
    int failed = suite_run(NULL, NULL);
    fprintf(stderr, "%d processes killed\n", kills);
    return failed || kills < (test_is_short() ? 10 : 30);
}
