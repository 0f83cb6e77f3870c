# make install: the library both ways, its headers and symbol map, pkg-config and CMake packages,
# the program, the manual, the Python package.
include(CMakePackageConfigHelpers)
set(DRAY_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/dray)

install(DIRECTORY include/dray DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS dray EXPORT drayTargets DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS dray_static DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES src/libdray.map DESTINATION ${CMAKE_INSTALL_DATADIR}/dray)
if(TARGET dray_program)
  install(TARGETS dray_program DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
file(GLOB pages CONFIGURE_DEPENDS docs/man/*.1)
install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)

# Where Python looks, or is told to look: PYTHONPATH, a .pth file. The package finds the library of
# its own prefix by itself.
set(DRAY_PYTHON_DIR lib/python3/dist-packages CACHE STRING
  "Where python/dray is installed, below the prefix; empty: nowhere")
if(DRAY_PYTHON_DIR)
  install(DIRECTORY python/dray DESTINATION ${DRAY_PYTHON_DIR} FILES_MATCHING PATTERN "*.py"
    PATTERN py.typed
    PATTERN __pycache__ EXCLUDE)
endif()

install(EXPORT drayTargets NAMESPACE dray:: DESTINATION ${DRAY_CMAKE_DIR})
configure_package_config_file(cmake/drayConfig.cmake.in ${CMAKE_BINARY_DIR}/drayConfig.cmake
  INSTALL_DESTINATION ${DRAY_CMAKE_DIR} PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/drayConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/drayConfig.cmake ${CMAKE_BINARY_DIR}/drayConfigVersion.cmake
  DESTINATION ${DRAY_CMAKE_DIR})

# dray.pc finds its prefix from its own place, so that a moved or DESTDIR installation works.
file(RELATIVE_PATH DRAY_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/dray.pc.in ${CMAKE_BINARY_DIR}/dray.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/dray.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# A wheel (pyproject.toml) has the library and the program within the package: dray/lib, dray/bin. Links
# do not last in one, so the library has the name that loaders ask for.
if(SKBUILD)
  install(FILES $<TARGET_FILE:dray> RENAME libdray.so.0 DESTINATION lib COMPONENT wheel)
  install(PROGRAMS $<TARGET_FILE:dray_program> DESTINATION bin COMPONENT wheel)
  if(DRAY_LICENSES) # of libraries that are linked statically: a folder (scripts/wheel.sh)
    install(DIRECTORY ${DRAY_LICENSES}/ DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT wheel)
  endif()
endif()
