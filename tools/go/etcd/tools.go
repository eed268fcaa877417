//go:build tools

// Package etcd names the command that tools/assets builds, so that go.mod keeps what it needs.
package etcd

import (
	_ "go.etcd.io/etcd/server/v3"
)
