/* The parts of `dray queue` (queue.h). */
#include "cmd/queue/queue.h"

#include "base/json.h"

#include "cmd/queue/queue_claim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BATCH_ROWS = 1024 };

/* ---- a session ------------------------------------------------------------------------------- */

int cmd_queue_with(const queue_arguments *a, const dray_queue_options *options,
                   cmd_queue_part *part, dray_error *error)
{
    dray_context *context = NULL;
    dray_queue *queue = NULL;
    dray_options open = DRAY_OPTIONS_INIT;
    dray_queue_options attach = DRAY_QUEUE_OPTIONS_INIT;
    open.address = a->address;
    open.name = "dray queue";
    open.timeout_ns = 2 * CMD_SECOND; /* a running session answers at once */
    attach.timeout_ns = 2 * CMD_SECOND;
    int rc = dray_open(&open, &context, error);
    if (rc == DRAY_OK)
        rc = dray_queue_open(context, a->queue, options ? options : &attach, &queue, error);
    if (rc == DRAY_OK)
        rc = part(a, queue, error);
    dray_queue_close(queue);
    dray_close(context);
    return rc;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* NAME:NEED,NEED>WRITE,WRITE, split in place. */
typedef struct task_text {
    char *text;
    const char *needs[CMD_LIST_MAX], *writes[CMD_LIST_MAX];
} task_text;

static uint32_t cut_names(char *text, const char **out)
{
    uint32_t count = 0;
    for (char *save = NULL, *name = strtok_r(text, ",", &save); name && count < CMD_LIST_MAX;
         name = strtok_r(NULL, ",", &save))
        out[count++] = name;
    return count;
}

static int read_task(const char *given, task_text *text, dray_queue_task *out, dray_error *error)
{
    text->text = strdup(given);
    char *needs = text->text ? strchr(text->text, ':') : NULL;
    if (!needs || needs == text->text) {
        return cmd_error(error, DRAY_EINVALID,
                         "--task '%.200s': NAME:NEEDS or NAME:NEEDS>WRITES expected, both lists of "
                         "columns with commas between",
                         given);
    }
    *needs++ = 0;
    char *writes = strchr(needs, '>');
    if (writes)
        *writes++ = 0;
    *out = (dray_queue_task){.name = text->text, .needs = text->needs, .writes = text->writes};
    out->needs_count = cut_names(needs, text->needs);
    out->writes_count = writes ? cut_names(writes, text->writes) : 0;
    return DRAY_OK;
}

static int say_opened(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue, (void)error;
    if (a->json)
        cmd_json_line(json_pack("{s:s, s:i}", "queue", a->queue, "tasks", (int)a->tasks.count));
    return DRAY_OK;
}

int cmd_queue_open(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    dray_queue_task tasks[CMD_LIST_MAX];
    task_text *texts = calloc(CMD_LIST_MAX, sizeof *texts);
    int rc = texts ? DRAY_OK : DRAY_ENOMEM;
    for (uint32_t i = 0; i < a->tasks.count && rc == DRAY_OK; i++)
        rc = read_task(a->tasks.items[i], &texts[i], &tasks[i], error);
    options.tasks = tasks;
    options.task_count = a->tasks.count;
    options.max_attempts = (uint32_t)a->max_attempts;
    options.capacity_rows = (uint64_t)a->capacity_rows;
    options.capacity_bytes = (uint64_t)a->capacity_bytes;
    options.on_loss = a->on_loss;
    options.durability = a->durability;
    options.provisional = a->provisional.items;
    options.provisional_count = a->provisional.count;
    if (rc == DRAY_OK)
        rc = cmd_queue_with(a, &options, say_opened, error);
    for (uint32_t i = 0; texts && i < a->tasks.count; i++)
        free(texts[i].text);
    free(texts);
    return rc;
}

/* ---- insert and load ------------------------------------------------------------------------- */

static int bad_json(dray_error *error, const char *where, size_t line, const json_error_t *why)
{
    return cmd_error(error, DRAY_EFORMAT, "%.200s, line %zu: a JSON object expected: %.150s", where,
                     line, why->text);
}

/* Appends the objects of a file, one on each line. Blank lines are skipped. */
static int read_lines(FILE *file, const char *where, json_t *rows, dray_error *error)
{
    char *line = NULL;
    size_t capacity = 0, number = 0;
    int rc = DRAY_OK;
    ssize_t length;
    while (rc == DRAY_OK && (length = getline(&line, &capacity, file)) >= 0) {
        json_error_t why;
        number++;
        if (strspn(line, " \t\r\n") == (size_t)length) /* zero bytes are no blank line */
            continue;
        json_t *row = json_loadb(line, (size_t)length, JSON_REJECT_DUPLICATES, &why);
        if (!json_is_object(row)) {
            if (row)
                snprintf(why.text, sizeof why.text, "an object expected, found another value");
            rc = bad_json(error, where, number, &why);
            json_decref(row);
        } else if (json_array_append_new(rows, row)) {
            rc = DRAY_ENOMEM;
        }
    }
    if (rc == DRAY_OK && ferror(file))
        rc = cmd_error(error, DRAY_ESYS, "%.200s, behind line %zu: %m", where, number);
    free(line);
    return rc;
}

static int read_file(const char *path, json_t *rows, dray_error *error)
{
    bool input = strcmp(path, "-") == 0;
    FILE *file = input ? stdin : fopen(path, "r");
    if (!file) {
        return cmd_error(error, DRAY_ENOENT, "%.300s: %m", path);
    }
    int rc = read_lines(file, input ? "standard input" : path, rows, error);
    if (!input)
        fclose(file);
    return rc;
}

/* Prints a line to stderr for work that takes longer than two seconds. */
typedef struct progress {
    int64_t next_ns;
    bool shown;
} progress;

static void show(progress *p, size_t done, size_t all)
{
    int64_t now = cmd_now();
    if (p->next_ns == 0)
        p->next_ns = now + 2 * CMD_SECOND;
    if (now < p->next_ns && !(p->shown && done == all))
        return;
    fprintf(stderr, "%s%zu of %zu rows%s", isatty(2) ? "\r" : "", done, all,
            isatty(2) && done < all ? "" : "\n");
    p->shown = true;
    p->next_ns = now + (isatty(2) ? CMD_SECOND / 4 : 2 * CMD_SECOND);
}

/* Takes the numbers that are tags out of the rows: [{"key": [numbers]}...]. */
static int take_tags(const queue_arguments *a, json_t *rows, json_t *out, dray_error *error)
{
    size_t i;
    json_t *row;
    for (uint32_t k = 0; k < a->tags.count; k++) {
        json_t *numbers = json_array();
        json_array_foreach(rows, i, row)
        {
            json_t *value = json_object_get(row, a->tags.items[k]);
            if (!json_is_number(value)) {
                json_decref(numbers);
                return cmd_error(error, DRAY_EINVALID, "row %zu has no number '%.200s' for a tag",
                                 i + 1, a->tags.items[k]);
            }
            json_array_append(numbers, value);
            json_object_del(row, a->tags.items[k]);
        }
        json_object_set_new(out, a->tags.items[k], numbers);
    }
    return DRAY_OK;
}

/* Returns the tags of rows first to first + count. */
static dray_row_tag *tags_of(const queue_arguments *a, json_t *tags, size_t first, size_t count)
{
    dray_row_tag *out = calloc(count * a->tags.count + 1, sizeof *out);
    for (uint32_t k = 0; out && k < a->tags.count; k++)
        for (size_t i = 0; i < count; i++)
            out[k * count + i] =
                (dray_row_tag){.row = (uint32_t)i,
                               .key = a->tags.items[k],
                               .number = json_number_value(json_array_get(
                                   json_object_get(tags, a->tags.items[k]), first + i))};
    return out;
}

static int insert_rows(const queue_arguments *a, dray_queue *queue, json_t *rows, dray_error *error)
{
    size_t all = json_array_size(rows), group = (size_t)a->group_size, done = 0;
    size_t step = a->whole ? all : BATCH_ROWS / group ? BATCH_ROWS / group * group : group;
    cmd_types *types;
    progress p = {0};
    json_t *tags = json_object();
    int rc = take_tags(a, rows, tags, error);
    if (!rc)
        rc = cmd_types_of(rows, a->dtypes, a->dtype_count, &types, error);
    if (rc) {
        json_decref(tags);
        return rc;
    }
    for (show(&p, 0, all); done < all && rc == DRAY_OK; show(&p, done, all)) {
        size_t count = all - done < step ? all - done : step;
        cmd_columns columns;
        dray_insert_options options = DRAY_INSERT_OPTIONS_INIT;
        rc = cmd_columns_of(types, done, count, &columns, error);
        if (rc)
            break;
        options.partition = a->partition;
        options.rows = (uint32_t)count;
        options.group_size = (uint32_t)group;
        options.columns = columns.items;
        options.column_count = columns.count;
        options.timeout_ns = a->timeout_s * CMD_SECOND;
        options.refill = (uint64_t)a->refill;
        dray_row_tag *row_tags = tags_of(a, tags, done, count);
        options.row_tags = row_tags;
        options.row_tag_count = (uint32_t)(count * a->tags.count);
        rc = row_tags ? dray_queue_insert(queue, &options, NULL, error) : DRAY_ENOMEM;
        free(row_tags);
        cmd_columns_free(&columns);
        done += rc == DRAY_OK ? count : 0;
    }
    cmd_types_free(types);
    json_decref(tags);
    return rc;
}

/* Seals the partition with all of its rows. Their number comes from the queue, because others may
 * have inserted, too. */
static int seal_all(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    char *text = NULL;
    int rc = dray_queue_status(queue, &text, error);
    if (rc)
        return rc;
    json_t *status = json_loads(text, 0, NULL), *partition;
    dray_free(text);
    size_t i;
    json_int_t rows = 0;
    json_array_foreach(json_object_get(status, "partitions"), i, partition)
    {
        const char *name = dray__json_string(partition, "name");
        if (name && strcmp(name, a->partition) == 0)
            rows = dray__json_integer(partition, "rows");
    }
    json_decref(status);
    return dray_queue_seal(queue, a->partition, (uint32_t)rows, error);
}

/* Inserts a->input, which has been checked. */
static int put_input(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    int rc = insert_rows(a, queue, a->input, error);
    if (rc == DRAY_OK && a->seal)
        rc = seal_all(a, queue, error);
    if (rc == DRAY_OK && a->json)
        cmd_json_line(json_pack("{s:I, s:s}", "inserted", (json_int_t)json_array_size(a->input),
                                "partition", a->partition));
    return rc;
}

/* Reads the rows that each word names (standard input without words), and inserts them if all are
 * valid. */
static int put_words(const queue_arguments *a,
                     int (*read)(const queue_arguments *, uint32_t, json_t *, dray_error *),
                     dray_error *error)
{
    queue_arguments with = *a;
    json_t *rows = with.input = json_array();
    int rc = a->words.count ? DRAY_OK : read_file("-", rows, error);
    for (uint32_t i = 0; i < a->words.count && rc == DRAY_OK; i++)
        rc = read(a, i, rows, error);
    size_t all = json_array_size(rows);
    if (rc == DRAY_OK && (all == 0 || all % (size_t)a->group_size))
        rc = cmd_error(error, DRAY_EINVALID,
                       all ? "%zu rows are not whole groups of %lld"
                           : "%zu rows: at least one expected",
                       all, (long long)a->group_size);
    if (rc == DRAY_OK)
        rc = cmd_queue_with(&with, NULL, put_input, error);
    json_decref(rows);
    return rc;
}

static int read_word(const queue_arguments *a, uint32_t i, json_t *rows, dray_error *error)
{
    FILE *text = fmemopen((char *)a->words.items[i], strlen(a->words.items[i]), "r");
    char where[32];
    snprintf(where, sizeof where, "argument %u", (unsigned)i + 1);
    int rc = text ? read_lines(text, where, rows, error) : DRAY_ENOMEM;
    if (text)
        fclose(text);
    return rc;
}

static int read_named_file(const queue_arguments *a, uint32_t i, json_t *rows, dray_error *error)
{
    return read_file(a->words.items[i], rows, error);
}

int cmd_queue_insert(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    queue_arguments with = *a;
    with.whole = true;
    return put_words(&with, read_word, error);
}

int cmd_queue_load(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    return put_words(a, read_named_file, error);
}

/* ---- seal, clear, end, wait ------------------------------------------------------------------ */

int cmd_queue_seal(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    return a->rows < 0 ? seal_all(a, queue, error)
                       : dray_queue_seal(queue, a->partition, (uint32_t)a->rows, error);
}

int cmd_queue_clear(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    return dray_queue_clear(queue, a->partition, error);
}

int cmd_queue_end(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)a;
    return dray_queue_end(queue, error);
}

int cmd_queue_wait(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    return dray_queue_wait(queue, a->partition, a->task, a->timeout_s * CMD_SECOND, error);
}

/* ---- claims ---------------------------------------------------------------------------------- */

int cmd_queue_claim(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    cmd_claim_request request = {a->address, a->queue, DRAY_CLAIM_OPTIONS_INIT};
    request.claim.task = a->task;
    request.claim.partition = a->partition;
    request.claim.count = a->rows < 0 ? 1 : (uint32_t)a->rows;
    request.claim.up_to = a->up_to;
    request.claim.policy = a->policy;
    request.claim.fresh = a->fresh >= 0;
    request.claim.version = a->fresh < 0 ? 0 : (uint64_t)a->fresh;
    request.claim.staleness = (uint32_t)a->staleness;
    request.claim.timeout_ns = a->timeout_s * CMD_SECOND;
    request.claim.max_hold_ns = a->hold_s * CMD_SECOND;
    request.claim.group = a->consumers;
    request.claim.cost = a->cost;
    request.claim.group_epoch = (uint64_t)a->epoch;
    request.claim.round = (uint64_t)a->round;
    request.claim.dp_rank = (uint32_t)a->rank;
    request.claim.dp_size = (uint32_t)a->ranks;
    request.claim.peer = (uint32_t)a->peer;
    request.claim.peers = (uint32_t)a->peers;
    request.claim.token_cap = (uint64_t)a->token_cap;
    request.claim.micro_rows = (uint32_t)a->micro_rows;
    json_t *claim;
    int rc = cmd_claim_start(&request, &claim, error);
    if (rc)
        return rc;
    if (a->json) {
        cmd_json_line(claim);
        return DRAY_OK;
    }
    printf("%s\n", dray__json_string(claim, "claim"));
    fprintf(stderr, "%zu rows of partition %s, held for up to %s\n",
            json_array_size(json_object_get(claim, "rows")), dray__json_string(claim, "partition"),
            dray__say_seconds((double)a->hold_s).s);
    json_decref(claim);
    return DRAY_OK;
}

int cmd_queue_read(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    json_t *columns = json_array(), *answer, *row;
    for (uint32_t i = 0; i < a->columns.count; i++)
        json_array_append_new(columns, json_string(a->columns.items[i]));
    int rc =
        cmd_claim_ask(a->words.items[0], json_pack("{s:s, s:o}", "do", "read", "columns", columns),
                      &answer, error);
    if (rc)
        return rc;
    size_t i;
    json_array_foreach(json_object_get(answer, "rows"), i, row) cmd_json_line(json_incref(row));
    json_decref(answer);
    return DRAY_OK;
}

/* Prints a claim's answer, if it has one. */
static int tell(const queue_arguments *a, json_t *request, dray_error *error)
{
    json_t *answer;
    int rc = cmd_claim_ask(a->words.items[0], request, &answer, error);
    if (rc)
        return rc;
    if (a->json)
        cmd_json_line(answer);
    else
        json_decref(answer);
    return DRAY_OK;
}

int cmd_queue_commit(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    json_t *request = json_pack("{s:s}", "do", "commit"), *rows = json_array();
    json_t *dtypes = json_object();
    int rc = a->words.count > 1 ? read_file(a->words.items[1], rows, error) : DRAY_OK;
    for (uint32_t i = 0; i < a->dtype_count; i++)
        json_object_set_new(dtypes, a->dtypes[i].column,
                            json_string(dray_dtype_name(a->dtypes[i].dtype)));
    json_object_set_new(request, "dtypes", dtypes);
    json_t *tags = json_object();
    if (rc == DRAY_OK)
        rc = take_tags(a, rows, tags, error);
    json_object_set_new(request, "tags", tags);
    json_object_set_new(request, "open", json_boolean(a->open));
    if (a->words.count > 1)
        json_object_set(request, "rows", rows);
    json_decref(rows);
    if (rc) {
        json_decref(request);
        return rc;
    }
    return tell(a, request, error);
}

int cmd_queue_fail(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    return tell(a, json_pack("{s:s, s:s}", "do", "fail", "reason", a->reason), error);
}

int cmd_queue_release(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    (void)queue;
    return tell(a, json_pack("{s:s}", "do", "release"), error);
}

/* ---- stat ------------------------------------------------------------------------------------ */

static void counts_cell(cmd_table *table, json_t *object)
{
    char text[160] = "-";
    size_t used = 0;
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) if (used < sizeof text) used +=
        (size_t)snprintf(text + used, sizeof text - used, "%s%s=%lld", used ? " " : "", key,
                         (long long)json_integer_value(value));
    cmd_cell(table, "%s", text);
}

static void print_partition(json_t *partition)
{
    static const char *const headings[] = {"task",  ">ready", ">taken", ">committed",
                                           ">dead", "",       NULL};
    const char *name;
    json_t *task;
    cmd_table *table = cmd_table_new(headings);
    json_object_foreach(json_object_get(partition, "tasks"), name, task)
    {
        static const char *const keys[] = {"ready", "taken", "committed", "dead"};
        cmd_cell(table, "%s", name);
        for (int i = 0; i < 4; i++)
            cmd_cell(table, "%lld", dray__json_integer(task, keys[i]));
        cmd_cell(table, "%s", dray__json_true(task, "finished") ? "finished" : "");
    }
    cmd_table_print(table, stdout);
}

static void print_status(json_t *status)
{
    static const char *const headings[] = {"partition", ">rows",   "sealed",
                                           ">bytes",    "columns", NULL};
    json_t *partitions = json_object_get(status, "partitions"), *partition;
    size_t i;
    const long long clients = dray__json_integer(status, "clients");
    printf("%lld rows of %lld, %s of %s, %lld claims, %lld client%s\n",
           dray__json_integer(status, "rows"), dray__json_integer(status, "capacity_rows"),
           dray__say_bytes(dray__json_number(status, "bytes")).s,
           dray__say_bytes(dray__json_number(status, "capacity_bytes")).s,
           dray__json_integer(status, "claims"), clients, clients == 1 ? "" : "s");
    json_array_foreach(partitions, i, partition)
    {
        cmd_table *table = cmd_table_new(headings);
        cmd_cell(table, "%s", dray__json_string(partition, "name"));
        cmd_cell(table, "%lld", dray__json_integer(partition, "rows"));
        cmd_cell(table, "%s", dray__json_true(partition, "sealed") ? "yes" : "no");
        cmd_cell(table, "%s", dray__say_bytes(dray__json_number(partition, "bytes")).s);
        counts_cell(table, json_object_get(partition, "columns"));
        putchar('\n');
        cmd_table_print(table, stdout);
        print_partition(partition);
    }
}

int cmd_queue_stat(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    char *text = NULL;
    int rc = dray_queue_status(queue, &text, error);
    json_t *status = rc ? NULL : json_loads(text, 0, NULL);
    dray_free(text);
    if (status && a->json) {
        cmd_json_line(status);
    } else if (status) {
        print_status(status);
        json_decref(status);
    }
    return rc;
}
