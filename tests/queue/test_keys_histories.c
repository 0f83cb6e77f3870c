/* Compares random histories of rows with keys with a plain model. Values that were put, by keys and
 * addresses, can be got by any client, with versions and tags, and consumers get a row once. The
 * same runs with a journal, whose coordinator is killed again and again, and which is rewritten
 * meanwhile. */
#include "base/random.h"
#include "queue/fixture.h"
#include "seed.h"

#include <stdint.h>

static queue_fixture f;
static uint64_t base_seed, draws;

enum { KEYS = 10, ROWS = 24, COLUMNS = 4, TASKS = 2, NOTE = 40, LARGE = 256 << 10 };

static const char *const partitions[] = {"p", "q"};
static const char *const columns[COLUMNS] = {"number", "text", "pair", "large"};
static const char *const tasks[TASKS] = {"train", "score"};

typedef struct model_row {
    bool there;
    int key; /* -1: none */
    dray_row at;
    int64_t values[COLUMNS]; /* 0: none */
    char note[NOTE];
    bool noted, consumed[TASKS];
} model_row;

static model_row model[2][ROWS];
static int64_t last_value;

static uint32_t draw(uint32_t below)
{
    return (uint32_t)(dray__random_u64(base_seed, 7, draws++) % below);
}

#define SAME(condition) same_at((condition), #condition, __LINE__)
static void same_at(bool condition, const char *text, int line)
{
    if (condition)
        return;
    fprintf(stderr, "line %d: %s (DRAY_TEST_SEED=%llu, draw %llu)\n", line, text,
            (unsigned long long)base_seed, (unsigned long long)draws);
    abort();
}

static const char *key_name(int key)
{
    static const char *const names[KEYS] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"};
    return names[key];
}

/* ---- values: what a number looks like in each column ----------------------------------------- */

typedef struct content {
    int64_t *numbers, (*pairs)[2];
    uint64_t *offsets;
    char *text;
    uint8_t *large;
} content;

static uint32_t text_of(int64_t value, char out[32])
{
    return (uint32_t)snprintf(out, 32, "%.*s%lld", (int)(value % 9), "---------", (long long)value);
}

static void write_columns(const int64_t values[][COLUMNS], const uint32_t *which, uint32_t count,
                          uint32_t rows, content *c, dray_column_data *out)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < rows; i++) {
        c->offsets[i] = end;
        end += text_of(values[i][1], c->text + end);
        c->numbers[i] = values[i][0];
        c->pairs[i][0] = values[i][2];
        c->pairs[i][1] = -values[i][2];
        memset(c->large + (size_t)i * LARGE, (int)(values[i][3] & 0xFF), LARGE);
        memcpy(c->large + (size_t)i * LARGE, &values[i][3], 8);
    }
    c->offsets[rows] = end;
    const dray_column_data all[COLUMNS] = {
        {.name = columns[0], .dtype = DRAY_I64, .values = c->numbers},
        {.name = columns[1],
         .dtype = DRAY_U8,
         .content = DRAY_CONTENT_STRING,
         .ndim = 1,
         .offsets = c->offsets,
         .values = c->text},
        {.name = columns[2], .dtype = DRAY_I64, .ndim = 1, .shape = {2}, .values = c->pairs},
        {.name = columns[3], .dtype = DRAY_U8, .ndim = 1, .shape = {LARGE}, .values = c->large}};
    for (uint32_t k = 0; k < count; k++)
        out[k] = all[which[k]];
}

static void check_value(dray_batch *batch, uint32_t column, uint32_t row, int64_t value)
{
    dray_column_part part;
    int rc = dray_batch_cell(batch, columns[column], row, &part, &error);
    if (!value) {
        SAME(rc == DRAY_ENOENT);
        return;
    }
    OK(rc);
    char text[32];
    int64_t pair[2] = {value, -value}, found;
    switch (column) {
    case 0:
        SAME(part.bytes == 8 && part.ndim == 0 && memcmp(part.values, &value, 8) == 0);
        break;
    case 1:
        SAME(part.bytes == text_of(value, text) && part.shape[0] == (int64_t)part.bytes &&
             memcmp(part.values, text, part.bytes) == 0);
        break;
    case 2:
        SAME(part.bytes == 16 && memcmp(part.values, pair, 16) == 0);
        break;
    default:
        memcpy(&found, part.values, 8);
        SAME(part.bytes == LARGE && found == value);
        for (uint32_t i = 8; i < LARGE; i += 1021)
            SAME(((const uint8_t *)part.values)[i] == (value & 0xFF));
    }
}

/* ---- the model ------------------------------------------------------------------------------- */

static model_row *find_key(uint32_t p, int key)
{
    for (uint32_t i = 0; i < ROWS; i++)
        if (model[p][i].there && model[p][i].key == key)
            return &model[p][i];
    return NULL;
}

static model_row *find_at(uint32_t p, const dray_row *at)
{
    for (uint32_t i = 0; i < ROWS; i++)
        if (model[p][i].there && model[p][i].at.slot == at->slot)
            return model[p][i].at.generation == at->generation ? &model[p][i] : NULL;
    return NULL;
}

static uint32_t rows_there(uint32_t p)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        count += model[p][i].there;
    return count;
}

static model_row *new_row(uint32_t p, int key)
{
    for (uint32_t i = 0; i < ROWS; i++)
        if (!model[p][i].there) {
            model[p][i] = (model_row){.there = true, .key = key};
            return &model[p][i];
        }
    return NULL;
}

static bool is_ready(const model_row *row, const uint32_t *which, uint32_t count)
{
    for (uint32_t k = 0; k < count; k++)
        if (!row->values[which[k]])
            return false;
    return true;
}

/* Some of 0..below-1, different ones, in any order. */
static uint32_t some(uint32_t below, uint32_t most, uint32_t *out)
{
    uint32_t all[ROWS], count = draw(most + 1);
    for (uint32_t i = 0; i < below; i++)
        all[i] = i;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t k = i + draw(below - i), swap = all[k];
        all[k] = all[i];
        out[i] = all[i] = swap;
    }
    return count;
}

/* A batch's row is the model's, in all that the batch has. */
static void check_row(dray_batch *batch, uint32_t i, const model_row *row, const uint32_t *which,
                      uint32_t count)
{
    const dray_row *at = dray_batch_row(batch, i);
    SAME(row && at->slot == row->at.slot && at->generation == row->at.generation);
    SAME(at->attempt == row->at.attempt);
    SAME(strcmp(dray_batch_key(batch, i), row->key < 0 ? "" : key_name(row->key)) == 0);
    dray_blob note = dray_batch_row_tag(batch, i);
    SAME((note.data != NULL) == row->noted);
    SAME(note.size == strlen(row->note) &&
         (!note.size || !memcmp(note.data, row->note, note.size)));
    for (uint32_t k = 0; k < count; k++)
        check_value(batch, which[k], i, row->values[which[k]]);
}

/* ---- what happens ---------------------------------------------------------------------------- */

static void do_put(dray_queue *queue, uint32_t p)
{
    static int64_t numbers[KEYS], pairs[KEYS][2];
    static uint64_t offsets[KEYS + 1];
    static char text[KEYS * 32];
    static uint8_t large[KEYS * (size_t)LARGE];
    content c = {numbers, pairs, offsets, text, large};
    uint32_t which[COLUMNS], chosen[KEYS], how = draw(4);
    uint32_t count = some(COLUMNS, COLUMNS, which), rows = some(KEYS, 5, chosen);
    int64_t values[KEYS][COLUMNS];
    const char *keys[KEYS];
    model_row *found[KEYS];
    dray_row at[KEYS], out[KEYS];
    dray_blob notes[KEYS];
    char words[KEYS][NOTE];
    dray_column_data data[COLUMNS];
    for (uint32_t i = 0, n = 0; how == 1 && i < ROWS; i++) /* by addresses of rows that are there */
        if (model[p][i].there && n < rows)
            found[n++] = &model[p][i];
        else if (i == ROWS - 1)
            rows = n;
    if (!rows || rows_there(p) + rows > ROWS - 1)
        return;
    for (uint32_t i = 0; i < rows; i++) {
        keys[i] = key_name((int)chosen[i]);
        if (how == 1)
            at[i] = found[i]->at;
        else
            found[i] = how == 2 ? NULL : find_key(p, (int)chosen[i]);
        for (uint32_t k = 0; k < COLUMNS; k++)
            values[i][k] = ++last_value;
        snprintf(words[i], NOTE, "%lld", (long long)++last_value);
        notes[i] = draw(2) ? (dray_blob){words[i], strlen(words[i])} : (dray_blob){NULL, 0};
    }
    write_columns((const int64_t(*)[COLUMNS])values, which, count, rows, &c, data);
    dray_put_options put = DRAY_PUT_OPTIONS_INIT;
    put.partition = partitions[p];
    put.rows = rows;
    put.columns = data;
    put.column_count = count;
    put.keys = how == 0 || how == 3 ? keys : NULL;
    put.at = how == 1 ? at : NULL;
    put.tags = draw(3) ? notes : NULL;
    OK(dray_queue_put(queue, &put, out, &error));
    for (uint32_t i = 0; i < rows; i++) {
        model_row *row = found[i];
        if (row) {
            SAME(row->at.slot == out[i].slot && row->at.generation == out[i].generation &&
                 row->at.attempt + 1 == out[i].attempt);
        } else {
            SAME(out[i].attempt == 1 && !find_at(p, &out[i]));
            row = new_row(p, how == 2 ? -1 : (int)chosen[i]);
        }
        row->at = out[i];
        for (uint32_t k = 0; k < count; k++)
            row->values[which[k]] = values[i][which[k]];
        if (put.tags && notes[i].data) {
            row->noted = true;
            memcpy(row->note, words[i], NOTE);
        }
    }
}

static dray_get_options get_of(uint32_t p, const uint32_t *which, uint32_t count,
                               const char **names)
{
    dray_get_options get = DRAY_GET_OPTIONS_INIT;
    get.partition = partitions[p];
    for (uint32_t k = 0; k < count; k++)
        names[k] = columns[which[k]];
    get.columns = names;
    get.column_count = count;
    return get;
}

static void do_get(dray_queue *queue, uint32_t p)
{
    const char *names[COLUMNS], *keys[KEYS];
    uint32_t which[COLUMNS], chosen[KEYS], expected = 0;
    uint32_t count = some(COLUMNS, COLUMNS, which), rows = some(KEYS, 4, chosen);
    dray_get_options get = get_of(p, which, count, names);
    const model_row *found[KEYS];
    if (!rows)
        return;
    bool whole = true;
    for (uint32_t i = 0; i < rows; i++) {
        keys[i] = key_name((int)chosen[i]);
        const model_row *row = find_key(p, (int)chosen[i]);
        whole &= row && is_ready(row, which, count);
        if (row)
            found[expected++] = row;
    }
    get.rows = rows;
    get.keys = keys;
    get.partial = draw(2);
    dray_batch *batch;
    int rc = dray_queue_get(queue, &get, &batch, &error);
    if (get.partial ? !expected : !whole) {
        SAME(rc == DRAY_EAGAIN);
        return;
    }
    OK(rc);
    SAME(dray_batch_rows(batch) == expected);
    for (uint32_t i = 0; i < expected; i++)
        check_row(batch, i, found[i], which, count);
    dray_batch_free(batch);
}

static void do_take(dray_queue *queue, uint32_t p)
{
    const char *names[COLUMNS];
    uint32_t which[COLUMNS], ready = 0, task = draw(TASKS);
    uint32_t count = some(COLUMNS, 2, which);
    dray_get_options get = get_of(p, which, count, names);
    get.task = tasks[task];
    get.count = draw(4);
    get.up_to = draw(2);
    get.peek = draw(3) == 0;
    for (uint32_t i = 0; i < ROWS; i++)
        ready += model[p][i].there && !model[p][i].consumed[task] &&
                 is_ready(&model[p][i], which, count);
    uint32_t expected = get.count && get.count < ready ? get.count : ready;
    dray_batch *batch;
    int rc = dray_queue_get(queue, &get, &batch, &error);
    if (!ready || (get.count > ready && !get.up_to)) {
        SAME(rc == DRAY_EAGAIN);
        return;
    }
    OK(rc);
    SAME(dray_batch_rows(batch) == expected);
    for (uint32_t i = 0; i < expected; i++) {
        model_row *row = find_at(p, dray_batch_row(batch, i));
        SAME(row && !row->consumed[task] && is_ready(row, which, count));
        SAME(!i || row->at.slot > dray_batch_row(batch, i - 1)->slot);
        check_row(batch, i, row, which, count);
        row->consumed[task] = !get.peek;
    }
    dray_batch_free(batch);
}

static void do_clear(dray_queue *queue, uint32_t p)
{
    uint32_t chosen[KEYS], rows = some(KEYS, 4, chosen), n = 0;
    const char *keys[KEYS];
    dray_row at[ROWS];
    if (draw(12) == 0) {
        int rc = dray_queue_clear(queue, partitions[p], &error);
        SAME(rc == DRAY_OK || (rc == DRAY_ENOENT && !rows_there(p)));
        memset(model[p], 0, sizeof model[p]);
        return;
    }
    if (draw(2)) {
        for (uint32_t i = 0; i < rows; i++) {
            keys[i] = key_name((int)chosen[i]);
            model_row *row = find_key(p, (int)chosen[i]);
            if (row)
                row->there = false;
        }
        OK(dray_queue_clear_rows(queue, partitions[p], keys, NULL, rows, &error));
        return;
    }
    for (uint32_t i = 0; i < ROWS; i++)
        if (draw(4) == 0) {
            at[n++] = model[p][i].at; /* of a row that is gone, maybe */
            model[p][i].there = false;
        }
    OK(dray_queue_clear_rows(queue, partitions[p], NULL, at, n, &error));
}

static void do_reset(dray_queue *queue, uint32_t p)
{
    uint32_t task = draw(TASKS + 1);
    OK(dray_queue_reset(queue, partitions[p], task < TASKS ? tasks[task] : NULL, &error));
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t t = 0; t < TASKS; t++)
            model[p][i].consumed[t] &= task < TASKS && t != task;
}

/* All that there is. */
static void check_all(dray_queue *queue)
{
    static const uint32_t all[COLUMNS] = {0, 1, 2, 3};
    for (uint32_t p = 0; p < 2; p++) {
        dray_get_options get = DRAY_GET_OPTIONS_INIT;
        const char *names[COLUMNS];
        dray_batch *batch;
        get = get_of(p, all, COLUMNS, names);
        get.partial = 1;
        int rc = dray_queue_get(queue, &get, &batch, &error);
        if (!rows_there(p)) {
            SAME(rc == DRAY_EAGAIN);
            continue;
        }
        OK(rc);
        SAME(dray_batch_rows(batch) == rows_there(p));
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            check_row(batch, i, find_at(p, dray_batch_row(batch, i)), all, COLUMNS);
        dray_batch_free(batch);
    }
}

static void history(dray_queue *queue, uint32_t steps, uint32_t lives)
{
    static void (*const does[])(dray_queue *, uint32_t) = {
        do_put, do_put, do_put, do_put, do_get, do_get, do_take, do_take, do_clear, do_reset};
    for (uint32_t life = 0; life < lives; life++) {
        for (uint32_t i = 0; i < steps; i++)
            does[draw(sizeof does / sizeof *does)](queue, draw(2));
        check_all(queue);
        if (life + 1 == lives)
            break;
        fixture_restart(&f);
        check_all(queue);
    }
}

static void run(bool durable, uint32_t steps, uint32_t lives)
{
    static const dray_queue_task unused[] = {{.name = "unused"}};
    f = (queue_fixture){.durable = durable};
    memset(model, 0, sizeof model);
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "keys");
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = unused;
    options.task_count = 1;
    options.capacity_rows = 2 * ROWS;
    options.durability = durable ? DRAY_DURABILITY_JOURNAL : DRAY_DURABILITY_NONE;
    dray_queue *queue;
    OK(dray_queue_open(context, "samples", &options, &queue, &error));
    history(queue, (uint32_t)test_times((int)steps), lives);
    leave(queue, context);
    fixture_down(&f);
}

TEST(test_a_history)
{
    run(false, 600, 1);
}

/* Large values make the journal be written anew: some 30 MB of what is replaced a life. */
TEST(test_a_history_with_a_journal)
{
    if (!elsewhere())
        run(true, 110, 4);
}

int main(void)
{
    base_seed = test_seed();
    return suite_run(NULL, NULL);
}
