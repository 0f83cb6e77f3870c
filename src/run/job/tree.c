#include "run/job/tree.h"

#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

enum { NODES_MAX = 10000, DEPTH_MAX = 16 };

void dray__tree_free(dray__node *node)
{
    if (!node)
        return;
    for (uint32_t i = 0; i < node->count; i++)
        dray__tree_free(node->children[i]);
    free(node->children);
    free(node->key);
    free(node->value);
    free(node);
}

static int node_new(int kind, const char *source, dray__text_place at, dray__node **out,
                    dray_error *error)
{
    dray__node *node = calloc(1, sizeof(*node));
    if (!node)
        return dray__nomem(error);
    node->kind = kind;
    node->source = source;
    node->at = at;
    *out = node;
    return DRAY_OK;
}

static int add_child(dray__node *parent, dray__node *child, dray_error *error)
{
    dray__node **children =
        realloc(parent->children, (parent->count + 1) * sizeof(*parent->children));
    if (!children)
        return dray__nomem(error);
    parent->children = children;
    parent->children[parent->count++] = child;
    return DRAY_OK;
}

dray__node *dray__tree_child(const dray__node *mapping, const char *key)
{
    for (uint32_t i = 0; i < mapping->count; i++)
        if (mapping->children[i]->key && strcmp(mapping->children[i]->key, key) == 0)
            return mapping->children[i];
    return NULL;
}

char *dray__place_text(const char *source, dray__text_place at, char out[DRAY__PLACE_BYTES])
{
    if (at.line > 0)
        snprintf(out, DRAY__PLACE_BYTES, "%s:%d:%d", source, at.line, at.column);
    else
        snprintf(out, DRAY__PLACE_BYTES, "%s", source);
    return out;
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct conversion {
    yaml_document_t *document;
    const char *source;
    uint32_t nodes;
    dray_error *error;
} conversion;

static int convert(conversion *c, int index, const yaml_node_t *key, int depth, dray__node **out);

static dray__text_place place_of(yaml_mark_t mark)
{
    return (dray__text_place){(int)mark.line + 1, (int)mark.column + 1};
}

static __attribute__((format(printf, 4, 5))) int refuse(const char *source, dray__text_place at,
                                                        dray_error *error, const char *format, ...)
{
    char message[DRAY_ERROR_MESSAGE_MAX], where[DRAY__PLACE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return dray__fail(error, DRAY_EFORMAT, "%s: %s", dray__place_text(source, at, where), message);
}

static int convert_pairs(conversion *c, const yaml_node_t *from, int depth, dray__node *to)
{
    for (yaml_node_pair_t *p = from->data.mapping.pairs.start; p < from->data.mapping.pairs.top;
         p++) {
        const yaml_node_t *key = yaml_document_get_node(c->document, p->key);
        if (key->type != YAML_SCALAR_NODE)
            return refuse(c->source, place_of(key->start_mark), c->error,
                          "a key must be a plain word");
        const char *name = (const char *)key->data.scalar.value;
        if (dray__tree_child(to, name))
            return refuse(c->source, place_of(key->start_mark), c->error, "'%.64s' is there twice",
                          name);
        dray__node *child = NULL;
        int rc = convert(c, p->value, key, depth + 1, &child);
        if (rc)
            return rc;
        child->key = strdup(name);
        rc = child->key ? add_child(to, child, c->error) : dray__nomem(c->error);
        if (rc) {
            dray__tree_free(child);
            return rc;
        }
    }
    return DRAY_OK;
}

static int convert_items(conversion *c, const yaml_node_t *from, int depth, dray__node *to)
{
    for (yaml_node_item_t *item = from->data.sequence.items.start;
         item < from->data.sequence.items.top; item++) {
        dray__node *child = NULL;
        int rc = convert(c, *item, NULL, depth + 1, &child);
        if (rc)
            return rc;
        rc = add_child(to, child, c->error);
        if (rc) {
            dray__tree_free(child);
            return rc;
        }
    }
    return DRAY_OK;
}

/* key is NULL for nodes without one. */
static int convert(conversion *c, int index, const yaml_node_t *key, int depth, dray__node **out)
{
    const yaml_node_t *from = yaml_document_get_node(c->document, index);
    dray__text_place at = place_of((key ? key : from)->start_mark);
    if (depth > DEPTH_MAX || ++c->nodes > NODES_MAX)
        return refuse(c->source, at, c->error, "too big: at most %d levels and %d values expected",
                      DEPTH_MAX, NODES_MAX);
    dray__node *node = NULL;
    int rc = node_new(from->type == YAML_SCALAR_NODE     ? DRAY__NODE_SCALAR
                      : from->type == YAML_SEQUENCE_NODE ? DRAY__NODE_SEQUENCE
                                                         : DRAY__NODE_MAPPING,
                      c->source, at, &node, c->error);
    if (rc)
        return rc;
    if (from->type == YAML_SCALAR_NODE) {
        if (strlen((const char *)from->data.scalar.value) != from->data.scalar.length)
            rc = refuse(c->source, at, c->error, "a value holds a zero byte");
        else if (!(node->value = strdup((const char *)from->data.scalar.value)))
            rc = dray__nomem(c->error);
    } else if (from->type == YAML_SEQUENCE_NODE) {
        rc = convert_items(c, from, depth, node);
    } else {
        rc = convert_pairs(c, from, depth, node);
    }
    if (rc)
        dray__tree_free(node);
    else
        *out = node;
    return rc;
}

static int parse_failed(yaml_parser_t *parser, const char *source, dray_error *error)
{
    if (parser->error == YAML_MEMORY_ERROR)
        return dray__nomem(error);
    return refuse(source, place_of(parser->problem_mark), error, "%s%s%s",
                  parser->problem ? parser->problem : "not YAML", parser->context ? " " : "",
                  parser->context ? parser->context : "");
}

static int second_document(yaml_parser_t *parser, const char *source, dray_error *error)
{
    yaml_document_t more;
    if (!yaml_parser_load(parser, &more))
        return parse_failed(parser, source, error);
    const yaml_node_t *root = yaml_document_get_root_node(&more);
    int rc = root ? refuse(source, place_of(root->start_mark), error,
                           "one document expected, found another")
                  : DRAY_OK;
    yaml_document_delete(&more);
    return rc;
}

int dray__tree_parse(const char *text, size_t size, const char *source, dray__node **out,
                     dray_error *error)
{
    yaml_parser_t parser;
    yaml_document_t document;
    if (!yaml_parser_initialize(&parser))
        return dray__nomem(error);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size);
    if (!yaml_parser_load(&parser, &document)) {
        int rc = parse_failed(&parser, source, error);
        yaml_parser_delete(&parser);
        return rc;
    }
    conversion c = {.document = &document, .source = source, .error = error};
    dray__node *root = NULL;
    int rc = yaml_document_get_root_node(&document)
                 ? convert(&c, 1, NULL, 0, &root)
                 : node_new(DRAY__NODE_MAPPING, source, (dray__text_place){1, 1}, &root, error);
    if (!rc && yaml_document_get_root_node(&document))
        rc = second_document(&parser, source, error);
    yaml_document_delete(&document);
    yaml_parser_delete(&parser);
    if (rc)
        dray__tree_free(root);
    else
        *out = root;
    return rc;
}

int dray__tree_setting(const char *setting, dray__node **out, dray_error *error)
{
    static const char source[] = "--set";
    const char *equals = strchr(setting, '=');
    if (!equals || equals == setting)
        return dray__fail(error, DRAY_EINVALID, "--set %s: expected KEY=VALUE, as in actor.lr=1e-3",
                          setting);
    const dray__text_place nowhere = {0};
    dray__node *node = NULL;
    dray_error why;
    int rc = equals[1] ? dray__tree_parse(equals + 1, strlen(equals + 1), source, &node, &why)
                       : node_new(DRAY__NODE_SCALAR, source, nowhere, &node, &why);
    if (rc) /* the mistake is in an argument, not in a file */
        return dray__fail(error, rc == DRAY_EFORMAT ? DRAY_EINVALID : rc, "%s", why.message);
    if (!equals[1] && !(node->value = strdup(""))) {
        dray__tree_free(node);
        return dray__nomem(error);
    }
    /* From the last part of the key to the first: each wraps the node so far in a mapping. */
    for (const char *end = equals; end;) {
        const char *begin = end;
        while (begin > setting && begin[-1] != '.')
            begin--;
        dray__node *parent = NULL;
        if (begin == end)
            rc = dray__fail(error, DRAY_EINVALID, "--set %s: a part of the key is empty", setting);
        else
            rc = node_new(DRAY__NODE_MAPPING, source, nowhere, &parent, error);
        if (!rc && !(node->key = strndup(begin, (size_t)(end - begin))))
            rc = dray__nomem(error);
        if (!rc)
            rc = add_child(parent, node, error);
        if (rc) {
            dray__tree_free(parent);
            dray__tree_free(node);
            return rc;
        }
        node->at = nowhere;
        node = parent;
        end = begin > setting ? begin - 1 : NULL;
    }
    *out = node;
    return DRAY_OK;
}
