"""Versions of all servers and jars. A unit test compares the module files, the compose file and the
lock with it.
"""

KAFKA = "4.2.1"
CONNECT = KAFKA
DEBEZIUM = "3.7.0.Final"
ELASTICSEARCH = "8.19.21"
POSTGRES = "18.6"
POSTGRES_WHEEL = "18.6.3"
VALKEY = "9.1"
PROMETHEUS = "v3.5.0"
GRAFANA = "12.1.1"
LOG4J = "2.25.3"

SPARK = "4.2.0"
DELTA = "4.4.0"
UNITY_CATALOG = "0.6.0"
SPARK_JARS = {
    "spark-sql-kafka-0-10_2.13": SPARK,
    # Older than Spark on purpose: newer ones can't be resolved everywhere, and only a Kerberos
    # class differs.
    "spark-token-provider-kafka-0-10_2.13": "4.0.0",
    "kafka-clients": "3.9.2",
    "commons-pool2": "2.12.1",
    "delta-spark_4.2_2.13": DELTA,
    "delta-storage": DELTA,
    "delta-kernel-api": DELTA,
    "delta-kernel-defaults": DELTA,
    "delta-kernel-unitycatalog": DELTA,
    "unitycatalog-client": UNITY_CATALOG,
    "unitycatalog-hadoop": UNITY_CATALOG,
}

JAVA_MIN = 17
# Version 7.0 is the first with the script effects and functions that the cache sink relies on.
REDIS_MIN = 7
