"""Object stores such as S3: their bytes, paths in them that read like those of a disk, and which job owns a run
there."""
