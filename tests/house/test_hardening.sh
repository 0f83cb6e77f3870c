# What a release build's program and library were hardened with, as their files say it.
set -eu
command -v readelf >/dev/null || exit 77
grep -q '^CMAKE_C_FLAGS:.*-fsanitize' "$DRAY_BUILD_DIR/CMakeCache.txt" && exit 77
grep -qE '^CMAKE_BUILD_TYPE:.*=(Release|RelWithDebInfo|MinSizeRel)$' "$DRAY_BUILD_DIR/CMakeCache.txt" || exit 77
fail()
{
    echo "FAILED: $*" >&2
    exit 1
}
for file in "$DRAY_PROGRAM" "$DRAY_LIBRARY"; do
    [ -f "$file" ] || continue
    readelf -W --segments --dynamic --notes "$file" >"$DRAY_BUILD_DIR/hardening.txt" 2>/dev/null
    has()
    {
        grep -qE -- "$1" "$DRAY_BUILD_DIR/hardening.txt" || fail "$file: $2"
    }
    has 'GNU_RELRO' 'no RELRO'
    has '\((FLAGS|FLAGS_1|BIND_NOW)\).*NOW|\(BIND_NOW\)' 'its symbols are not bound at start (-z now)'
    ! grep -E 'GNU_STACK' "$DRAY_BUILD_DIR/hardening.txt" | grep -q 'RWE' || fail "$file: its stack may be executed"
    readelf -W --dyn-syms "$file" >"$DRAY_BUILD_DIR/hardening.txt"
    has '__stack_chk_fail' 'no stack protector'
    has '__(memcpy|snprintf|vsnprintf|read|recv|strcpy|fprintf|vfprintf)_chk' 'no _FORTIFY_SOURCE'
done
# Marks of CET are in a file only if the C library's own objects have them; the code has it in any case.
if [ "$(uname -m)" = x86_64 ]; then
    objdump -d --disassemble=dray_version "$DRAY_LIBRARY" | grep -A1 '<dray_version.*>:$' | grep -q endbr64 ||
        fail "$DRAY_LIBRARY: no CET (-fcf-protection)"
fi
readelf -W --file-header "$DRAY_PROGRAM" | grep -q 'Type:.*DYN' || fail "$DRAY_PROGRAM: its addresses are fixed (no PIE)"
rm -f "$DRAY_BUILD_DIR/hardening.txt"
