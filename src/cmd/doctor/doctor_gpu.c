/* dray doctor: the GPUs, how they reach each other, and how fast. */
#include "cmd/cmd.h"
#include "cmd/doctor/doctor.h"

#include <dray/gpu.h>

typedef struct path {
    int32_t from, to; /* -1 for pinned host memory */
    const char *kind;
    double rate;      /* 0 when not measured */
    dray_error error; /* code 0 when there is none */
} path;

static int32_t count_gpus(void)
{
    int32_t count = 0;
    return dray_gpu_count(&count, NULL, NULL) ? 0 : count;
}

static path look_at(int32_t from, int32_t to, bool measure)
{
    static const char *const names[] = {[DRAY_GPU_LINK_NONE] = "none",
                                        [DRAY_GPU_LINK_SAME] = "itself",
                                        [DRAY_GPU_LINK_PCIE] = "PCIe",
                                        [DRAY_GPU_LINK_NVLINK] = "NVLink"};
    path p = {.from = from, .to = to, .kind = "host"};
    int32_t link = DRAY_GPU_LINK_PCIE;
    if (from >= 0 && to >= 0) {
        if (dray_gpu_get_link(from, to, &link, &p.error))
            link = DRAY_GPU_LINK_NONE;
        p.kind = names[link];
    }
    if (measure && link != DRAY_GPU_LINK_NONE &&
        dray_gpu_measure(from, to, &p.rate, &p.error) == DRAY_OK)
        p.error.code = DRAY_OK;
    return p;
}

static const char *name_of(int32_t index, char out[24])
{
    if (index < 0)
        snprintf(out, 24, "host");
    else
        snprintf(out, 24, "GPU %d", (int)index);
    return out;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void list_table(int32_t count)
{
    static const char *const headings[] = {"GPU",  "name", ">memory", ">compute",
                                           ">SMs", "PCI",  "UUID",    NULL};
    cmd_table *table = cmd_table_new(headings);
    for (int32_t i = 0; i < count; i++) {
        dray_gpu gpu = DRAY_GPU_INIT;
        if (dray_gpu_get(i, &gpu, NULL))
            continue;
        cmd_cell(table, "%d", (int)i);
        cmd_cell(table, "%s", gpu.name);
        cmd_cell(table, "%s", dray__say_bytes((double)gpu.bytes).s);
        cmd_cell(table, "%d.%d", gpu.arch / 10, gpu.arch % 10);
        cmd_cell(table, "%d", gpu.multiprocessors);
        cmd_cell(table, "%s", gpu.pci);
        cmd_cell(table, "%s", gpu.uuid_text);
    }
    cmd_table_print(table, stdout);
}

static void path_cell(cmd_table *table, int32_t from, int32_t to, bool measure)
{
    path p = look_at(from, to, measure);
    if (p.rate > 0)
        cmd_cell(table, "%s %s/s", p.kind, dray__say_bytes(p.rate).s);
    else
        cmd_cell(table, "%s", p.error.code ? "failed" : p.kind);
}

static void matrix_table(int32_t count, bool measure)
{
    enum { MOST = 64 };
    static char names[MOST + 1][24];
    const char *headings[MOST + 3] = {"from, to"};
    if (count > MOST)
        count = MOST;
    for (int32_t i = 0; i < count; i++)
        headings[i + 1] = name_of(i, names[i]);
    if (measure)
        headings[count + 1] = "host";
    cmd_table *table = cmd_table_new(headings);
    for (int32_t from = measure ? -1 : 0; from < count; from++) {
        char name[24];
        cmd_cell(table, "%s", name_of(from, name));
        for (int32_t to = 0; to < count; to++)
            path_cell(table, from, to, measure);
        if (measure && from < 0)
            cmd_cell(table, "%s", "");
        else if (measure)
            path_cell(table, from, -1, measure);
    }
    cmd_table_print(table, stdout);
}

void doctor_gpus_table(bool measure)
{
    int32_t count = count_gpus();
    if (!count)
        return;
    puts("");
    list_table(count);
    if (count > 1 || measure) {
        puts("");
        matrix_table(count, measure);
    }
}

/* ---- objects --------------------------------------------------------------------------------- */

static json_t *object(const char *name, bool found, const char *detail)
{
    return json_pack("{s:s, s:b, s:s, s:s, s:s, s:b}", "name", name, "found", found, "detail",
                     detail, "need", "fact", "without", "", "ok", true);
}

static void path_json(int32_t from, int32_t to, bool measure)
{
    char a[24], b[24], name[64];
    path p = look_at(from, to, measure);
    snprintf(name, sizeof name, "%s to %s", name_of(from, a), name_of(to, b));
    json_t *line = object(name, p.error.code == DRAY_OK && p.kind[0] != 'n',
                          p.error.code ? p.error.message : p.kind);
    if (line && p.rate > 0)
        json_object_update_new(line, json_pack("{s:f, s:s}", "value", p.rate, "unit", "B/s"));
    cmd_json_line(line);
}

void doctor_gpus_json(bool measure)
{
    int32_t count = count_gpus();
    for (int32_t i = 0; i < count; i++) {
        dray_gpu gpu = DRAY_GPU_INIT;
        char name[24], detail[320];
        if (dray_gpu_get(i, &gpu, NULL))
            continue;
        snprintf(detail, sizeof detail, "%s, compute %d.%d, %d SMs, %s, %s", gpu.name,
                 gpu.arch / 10, gpu.arch % 10, gpu.multiprocessors, gpu.pci, gpu.uuid_text);
        json_t *line = object(name_of(i, name), true, detail);
        if (line)
            json_object_update_new(line, json_pack("{s:f, s:s, s:s}", "value", (double)gpu.bytes,
                                                   "unit", "B", "uuid", gpu.uuid_text));
        cmd_json_line(line);
    }
    for (int32_t from = measure ? -1 : 0; from < count; from++)
        for (int32_t to = measure && from >= 0 ? -1 : 0; to < count; to++)
            if (from != to || measure)
                path_json(from, to, measure);
}
