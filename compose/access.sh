#!/bin/sh
# A user on the bus and keys for the store, one a role, each in a volume that only the role's containers mount.
# It runs at every `up`: what exists stays, so that nobody is locked out. STORE_FLAVOUR: seaweedfs, minio, or shared, one pair of
# keys for all roles (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a new one), for stores without policies or with their own.
set -eu
umask 077
root=${ROOT:-} # of the volumes' mount points; a test has its own
all=$root/access/all

secret() { # FILE BYTES: a new secret, unless there is one
    [ -s "$1" ] || python -c "import secrets; print(secrets.token_hex($2))" > "$1"
}

towline access nats --run "$RUN" --out "$all"
if [ "$STORE_FLAVOUR" = shared ]; then
    secret "$all/admin.s3-access" 10
    secret "$all/admin.s3-secret" 20
    if [ -n "${AWS_ACCESS_KEY_ID:-}" ]; then
        echo "$AWS_ACCESS_KEY_ID" > "$all/admin.s3-access"
        echo "${AWS_SECRET_ACCESS_KEY:?goes with AWS_ACCESS_KEY_ID}" > "$all/admin.s3-secret"
    fi
    for seed in "$all"/*.nk; do
        role=$(basename "$seed" .nk)
        cp "$all/admin.s3-access" "$all/$role.s3-access"
        cp "$all/admin.s3-secret" "$all/$role.s3-secret"
    done
else
    towline access s3 --run "$RUN" --out "$all" --flavour "$STORE_FLAVOUR" --bucket "$BUCKET" --prefix "$PREFIX"
    secret "$all/admin.s3-access" 10
    secret "$all/admin.s3-secret" 20
fi
secret "$all/service.token" 24
secret "$all/tenant.token" 24
secret "$all/grafana.password" 12

give() { # FOLDER FILE…
    folder=$root/access/$1
    shift
    for file; do install -m 0400 "$all/$file" "$folder/"; done
}

for role in init buffer rollout-worker reward trainer publisher gateway gc; do
    give "$role" "$role.nk" "$role.s3-access" "$role.s3-secret" service.token
done
give gateway tenant.token
give load tenant.token
give nats nats.conf
give store admin.s3-access admin.s3-secret
case $STORE_FLAVOUR in
    seaweedfs)
        # Whoever talks to the S3 server's gRPC needs a certificate that this one signed, and there is none.
        [ -s "$all/grpc.crt" ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=store \
            -days 36500 -keyout "$all/grpc.key" -out "$all/grpc.crt" 2> /dev/null
        give store s3.json grpc.crt grpc.key
        ;;
    minio)
        for file in "$all"/*.policy.json "$all"/apply.sh "$all"/*.s3-access "$all"/*.s3-secret; do
            give store "$(basename "$file")"
        done
        ;;
esac
give observe service.token grafana.password

# The servers' volumes belong to this user, as long as they aren't empty: an empty one takes the owner of what it's mounted over.
for folder in nats store prometheus grafana; do touch "$root/data/$folder/.towline"; done
