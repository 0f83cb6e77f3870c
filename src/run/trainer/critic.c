/* The value model's trainer: the tasks value and critic on one sharded trainer whose head gives
 * each token one number. Its steps are those of trainer.c. */
#include "run/trainer/checkpoint.h"
#include "run/trainer/learn.h"

#include <math.h>

/* ---- opening --------------------------------------------------------------------------------- */

/* The value model begins as the policy that training starts from, with a head of zeros. */
static int begin(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    char path[4096];
    int64_t first = host->options.first_step;
    dray__checkpoint_path(host->options.folder, 0, path, sizeof(path));
    if (first > 0)
        dray__critic_path(host->options.folder, first, path, sizeof(path));
    int rc = first > 0 ? dray__trainer_restore(self->trainer, path, error)
                       : dray__trainer_load_trunk(self->trainer, path, error);
    if (!rc)
        rc = dray__publication_open(host, self->trainer, self->what->model, self->what->publish,
                                    &self->publication, error);
    return rc ? rc : dray__learner_publish(host, error);
}

int dray__critic_open(dray__host *host, dray_error *error)
{
    char path[4096];
    int rc = dray__learner_open(host, &dray__learned_value, 1, error);
    dray__checkpoint_path(host->options.folder, host->options.first_step, path, sizeof(path));
    if (!rc)
        dray__learner_await(host, path, begin);
    return rc;
}

/* ---- tasks ----------------------------------------------------------------------------------- */

uint32_t dray__value_count(const dray__host *host)
{
    const dray__learner *self = host->state;
    uint32_t most = (uint32_t)host->job->critic.micro_batch, left = 0;
    if (self->settled || self->then)
        return 0;
    if (!self->late)
        return most;
    return dray__late_left(host, &left, NULL) ? 0 : dray__late_bind(host, most, left);
}

bool dray__value_newest(const dray__host *host)
{
    const dray__learner *self = host->state;
    return self->late && dray__late_newest(host);
}

static int score_values(dray__host *host, const dray__sequences *sequences, float *out,
                        dray_error *error)
{
    const dray__learner *self = host->state;
    return dray__trainer_values(self->trainer, sequences, out, error);
}

int dray__value_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    (void)step;
    int rc = dray__learner_score(host, batch, "value", score_values, error);
    if (!rc)
        dray__late_bound(host->state, batch);
    return rc;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static double value_rate(const dray__job *job)
{
    return job->critic.lr;
}

static int64_t value_epochs(const dray__job *job)
{
    return job->critic.epochs;
}

static int value_accumulate(dray__host *host, const dray__micro *micro, const bool *masked,
                            dray_error *error)
{
    const dray__learner *self = host->state;
    const dray__job *job = host->job;
    const dray__value_batch batch = {.sequences = dray__micro_sequences(micro),
                                     .returns = micro->returns.values,
                                     .values = micro->values.values,
                                     .masked = masked,
                                     .aggregate = job->actor.aggregate,
                                     .length = (double)job->rollout.max_new_tokens,
                                     .clip = job->critic.clip};
    return dray__trainer_accumulate_value(self->trainer, &batch, error);
}

static void value_measure(dray__host *host, const dray__micro *micro)
{
    dray__learner *self = host->state;
    dray__step_sums *s = &self->sums;
    const float *values = micro->values.values, *returns = micro->returns.values;
    dray__sequences sequences = dray__micro_sequences(micro);
    for (uint64_t i = 0; i < micro->response.offsets[micro->rows]; i++) {
        if (!dray__token_counts(&sequences, i))
            continue;
        double value = (double)values[i], aim = (double)returns[i], error = aim - value;
        s->values += value;
        s->returns += aim;
        s->returns_square += aim * aim;
        s->errors += error;
        s->errors_square += error * error;
        s->tokens++;
    }
}

static double variance(double sum, double squares, double count)
{
    return squares / count - sum / count * (sum / count);
}

static int value_tell(dray__host *host, dray_error *error)
{
    const dray__learner *self = host->state;
    const dray__step_sums *s = &self->sums;
    double tokens = (double)s->tokens, trained = (double)s->trained_tokens;
    double spread = variance(s->returns, s->returns_square, tokens);
    const struct {
        const char *key;
        double value;
    } reals[] = {
        {"value_loss", s->loss / s->steps},
        {"value_grad_norm", s->gradient_norm / s->steps},
        {"value_clip_fraction", s->clip_fraction / trained},
        {"value_mean", s->values / tokens},
        {"returns_mean", s->returns / tokens},
        /* of the returns, by the values that the step began with: 1 - Var(R - V) / Var(R) */
        {"explained_variance",
         spread > 0 ? 1 - variance(s->errors, s->errors_square, tokens) / spread : NAN}};
    json_t *row = json_pack("{s:I}", "step", (json_int_t)self->step);
    bool ok = row != NULL;
    for (size_t i = 0; i < sizeof(reals) / sizeof(reals[0]) && ok; i++)
        ok = dray__row_add(row, reals[i].key, reals[i].value);
    if (!ok) {
        json_decref(row);
        row = NULL;
    }
    return dray__host_report(host, self->what->task, row, error);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static int value_last_checkpoint(dray__host *host, int64_t step, dray_error *error)
{
    const dray__learner *self = host->state;
    return dray__checkpoint_critic(host, self->trainer, step, error);
}

static int value_checkpoint(dray__host *host, int64_t step, dray_error *error)
{
    char path[4096];
    int rc = value_last_checkpoint(host, step, error);
    dray__checkpoint_path(host->options.folder, step, path, sizeof(path));
    if (!rc)
        dray__learner_await(host, path, dray__learner_go_on);
    return rc;
}

const dray__learned dray__learned_value = {.task = "critic",
                                           .model = "critic",
                                           .optimiser = "critic_optimiser",
                                           .publish = "critic_publish",
                                           .rate = value_rate,
                                           .epochs = value_epochs,
                                           .accumulate = value_accumulate,
                                           .measure = value_measure,
                                           .tell = value_tell,
                                           .checkpoint = value_checkpoint,
                                           .last_checkpoint = value_last_checkpoint};
