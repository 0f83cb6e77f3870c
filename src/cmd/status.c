/* dray status: the state of a coordinator. Each of its services adds lists of objects to the
 * answer; every list becomes a table, and every list within one a table below it, so that a new
 * service needs nothing here. */
#include "base/json.h"
#include "cmd/cmd.h"
#include "run/report/prometheus.h"
#include "run/supervisor/coordinator.h"

#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    const char *address;
    bool json, prometheus;
} arguments;

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

/* Returns true when the value needs a table of its own: an array of objects, or an object of
 * objects. */
static bool is_table(json_t *value)
{
    if (json_is_array(value))
        return json_is_object(json_array_get(value, 0));
    const char *key;
    json_t *part;
    json_object_foreach(value, key, part) if (!json_is_object(part)) return false;
    return json_object_size(value) > 0;
}

static bool is_empty(const json_t *value)
{
    return (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0);
}

/* Writes a value in words: "prompts=32 responses=20", "0, 1", "yes". A value inside another one
 * is in parentheses. */
static void put_words(FILE *out, json_t *value, bool inner)
{
    const char *key, *between = "";
    json_t *part;
    size_t i;
    bool group = inner && (json_is_object(value) || json_array_size(value) > 0);
    fputs(group ? "(" : "", out);
    if (!value || json_is_null(value) || is_empty(value))
        fputs("-", out);
    else if (json_is_string(value))
        fputs(json_string_value(value), out);
    else if (json_is_boolean(value))
        fputs(json_is_true(value) ? "yes" : "no", out);
    else if (json_is_integer(value))
        fprintf(out, "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        fprintf(out, "%.6g", json_real_value(value));
    json_array_foreach(value, i, part)
    {
        fputs(i ? ", " : "", out);
        put_words(out, part, true);
    }
    json_object_foreach(value, key, part)
    {
        fprintf(out, "%s%s=", between, key);
        put_words(out, part, true);
        between = " ";
    }
    fputs(group ? ")" : "", out);
}

static void print_words(cmd_table *table, json_t *value)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (out) {
        put_words(out, value, false);
        fclose(out);
    }
    cmd_cell(table, "%s", text ? text : "?");
    free(text);
}

static void print_cell(cmd_table *table, const char *key, json_t *value)
{
    if (!value || json_is_null(value) || is_empty(value)) {
        cmd_cell(table, "-");
    } else if (json_is_number(value) && ends_with(key, "seconds")) {
        cmd_cell(table, "%s", dray__say_seconds(json_number_value(value)).s);
    } else if (json_is_number(value) && ends_with(key, "bytes")) {
        cmd_cell(table, "%s", dray__say_bytes(json_number_value(value)).s);
    } else {
        print_words(table, value);
    }
}

/* "age_seconds" gets the heading "age", as its cells show the unit. */
static void make_heading(char *out, size_t capacity, const char *key, const json_t *value)
{
    size_t length = strlen(key);
    if (length > 8 && ends_with(key, "_seconds"))
        length -= 8;
    snprintf(out, capacity, "%s%.*s", json_is_number(value) ? ">" : "", (int)length, key);
    for (char *c = out; *c; c++)
        if (*c == '_')
            *c = ' ';
}

enum { COLUMNS = 24 };

static void print_list(const char *title, json_t *list);

/* Writes the names of the row's values that need a table: "queues samples, partitions". */
static void print_inner(const char *title, json_t *row)
{
    const char *key, *name = dray__json_string(row, "name");
    json_t *value;
    json_object_foreach(row, key, value)
    {
        char inner[160];
        snprintf(inner, sizeof inner, "%s%s%s, %s", title, name ? " " : "", name ? name : "", key);
        if (is_table(value))
            print_list(inner, value);
    }
}

/* The columns are the keys of the first object. */
static void print_array(const char *title, json_t *list)
{
    const char *keys[COLUMNS], *headings[COLUMNS + 1], *key;
    char texts[COLUMNS][48];
    json_t *value, *row;
    size_t columns = 0, i;
    json_object_foreach(json_array_get(list, 0), key, value)
    {
        if (columns == COLUMNS || is_table(value))
            continue;
        make_heading(texts[columns], sizeof texts[columns], key, value);
        headings[columns] = texts[columns];
        keys[columns++] = key;
    }
    headings[columns] = NULL;
    printf("\n%s:\n", title);
    cmd_table *table = cmd_table_new(headings);
    json_array_foreach(list, i, row) for (size_t c = 0; c < columns; c++)
        print_cell(table, keys[c], json_object_get(row, keys[c]));
    cmd_table_print(table, stdout);
    json_array_foreach(list, i, row) print_inner(title, row);
}

/* Objects inside an object get their key as a name. */
static void print_list(const char *title, json_t *list)
{
    if (json_is_array(list)) {
        print_array(title, list);
        return;
    }
    const char *key;
    json_t *value, *rows = json_array();
    json_object_foreach(list, key, value)
    {
        json_t *row = json_pack("{s:s}", "name", key);
        json_object_update(row, value);
        json_array_append_new(rows, row);
    }
    print_array(title, rows);
    json_decref(rows);
}

static void print_text(const char *address, json_t *object)
{
    const char *name;
    json_t *part;
    printf("%s: dray %s, process %lld, up %s\n", address, dray__json_string(object, "version"),
           dray__json_integer(object, "pid"),
           dray__say_seconds(dray__json_number(object, "age_seconds")).s);
    json_object_foreach(object, name,
                        part) if (json_is_array(part) && json_is_object(json_array_get(part, 0)))
        print_list(name, part);
}

static int ask(const char *address, json_t **out, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = address;
    options.name = "dray status";
    options.role = "tool";
    options.timeout_ns = 2000000000; /* The user wants to know whether it is there now. */
    dray_context *context;
    char *text = NULL;
    int status = dray_open(&options, &context, error);
    if (status)
        return status;
    status = dray_context_status(context, &text, error);
    dray_close(context);
    if (!status)
        *out = json_loads(text, 0, NULL);
    dray_free(text);
    return status;
}

int cmd_status(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_TEXT(arguments, address, "connect", 'c', "ADDRESS",
                 "The coordinator. Default: $DRAY_ADDRESS, or where dray serve listens by default"),
        CMD_FLAG(arguments, json, "json", 'j', "Print one object"),
        CMD_FLAG(arguments, prometheus, "prometheus", 'p',
                 "Print metrics in the text format of Prometheus"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .doc = "Shows a coordinator's sessions, models and queues.\vFails when none is there."};
    arguments a = {0};
    char path[256], fallback[300];
    cmd_parse(&usage, argc, argv, &a);
    if (!a.address)
        a.address = getenv("DRAY_ADDRESS");
    if (!a.address || !a.address[0]) {
        snprintf(fallback, sizeof fallback, "unix:%s", dray__default_socket(path, sizeof path));
        a.address = fallback;
    }
    json_t *object = NULL;
    dray_error error;
    int status = ask(a.address, &object, &error);
    if (status == DRAY_ECLOSED)
        return cmd_failf("status", "%s (--connect ADDRESS or $DRAY_ADDRESS says where one is)",
                         error.message);
    if (status)
        return cmd_refuse("status", &error);
    if (!object)
        return cmd_failf("status", "%s: its answer is no JSON", a.address);
    if (a.json) {
        cmd_json_line(object);
    } else if (a.prometheus) {
        dray__prometheus(object, stdout);
        json_decref(object);
    } else {
        print_text(a.address, object);
        json_decref(object);
    }
    return CMD_OK;
}
